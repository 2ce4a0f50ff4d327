#!/usr/bin/env bash
# ADE20K as in the scene parsing challenge of 2016: 150 classes (data.root=<folder>).
#   bash scripts/download_ade.sh <folder>
#
#   ADEChallengeData2016.zip  1 GB  20,210 + 2,000 images and masks   http://data.csail.mit.edu/places/ADEchallenge
#
# Unpacked 1 GB. No checksum is published: the archive is verified by those of its members (unzip -t) and the images
# are counted. ADE_MD5 has it verified by an MD5 of your own, ADE_URL names another place (a folder on a server).
#
# Started again, it resumes where it stopped. Without a network: put the archive into <folder> yourself; it is verified and
# unpacked. It may be deleted afterwards. Exit code: that of scripts.check_data, which runs at the end; 1 if something failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "$0" "$@"
[ $# -eq 1 ] || fail "unknown argument ${2}; see --help"

ade="$folder/ADEChallengeData2016"
if [ ! -d "$ade" ]; then
  command -v unzip >/dev/null || fail "unzip is needed; install it"
  judge=(is_zip)
  [ -z "${ADE_MD5:-}" ] || judge=(has_md5 "$ADE_MD5")
  fetch "${ADE_URL:-http://data.csail.mit.edu/places/ADEchallenge}/ADEChallengeData2016.zip" "${judge[@]}"
  unzip -q "$archive" -d "$unpacked"
  place ADEChallengeData2016 "$ade"
fi
check ade
