#!/usr/bin/env bash
# PASCAL VOC 2012 with the extra masks of SBD, ready for training (data.root=<folder>).
#   bash scripts/download_voc.sh <folder> [--without-sbd]
#
#   VOCtrainval_11-May-2012.tar  2.0 GB  images, masks and lists      https://thor.robots.ox.ac.uk/pascal/VOC/voc2012
#   benchmark.tgz (SBD)          1.4 GB  masks of 9,118 more images   https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours
#
# Unpacked 2.2 GB. Both are verified by their MD5. SegmentationClassAug and train_aug.txt, which published numbers need, are
# made from the two by `python -m scripts.merge_sbd` (needs scipy); no official archive of them exists. If you have them,
# put SegmentationClassAug into VOCdevkit/VOC2012 and train_aug.txt into its ImageSets/Segmentation: SBD is not fetched then.
# --without-sbd leaves it at VOC's own 1,464 training images.
#
# Started again, it resumes where it stopped. Without a network: put the archives into <folder> yourself; they are verified
# and unpacked. VOC_URL and SBD_URL name other places (folders on a server), VOC_MD5 and SBD_MD5 other versions.
# Archives may be deleted afterwards. Exit code: that of scripts.check_data, which runs at the end; 1 if something failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"
begin "$0" "$@"
case "${2:-}" in '' | --without-sbd) ;; *) fail "unknown argument ${2}; see --help" ;; esac

voc="$folder/VOCdevkit/VOC2012" sbd="$folder/benchmark_RELEASE/dataset"
with_sbd=yes
if [ "${2:-}" = --without-sbd ] || { [ -d "$voc/SegmentationClassAug" ] && [ -e "$voc/ImageSets/Segmentation/train_aug.txt" ]; }; then
  with_sbd=no
elif ! "$PYTHON" -c 'import scipy' 2>/dev/null; then # said before gigabytes are fetched
  fail "the masks of SBD need scipy: $PYTHON -m pip install scipy, or leave them out with --without-sbd"
fi

if [ ! -d "$voc/JPEGImages" ]; then
  fetch "${VOC_URL:-https://thor.robots.ox.ac.uk/pascal/VOC/voc2012}/VOCtrainval_11-May-2012.tar" \
    has_md5 "${VOC_MD5:-6cd6e144f989b92b3379bac3b3de84fd}"
  tar -xf "$archive" -C "$unpacked"
  place VOCdevkit/VOC2012 "$voc"
fi
if [ "$with_sbd" = yes ]; then
  if [ ! -d "$sbd" ]; then
    fetch "${SBD_URL:-https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours}/benchmark.tgz" \
      has_md5 "${SBD_MD5:-82b4d87ceb2ed10f6038a1cba92111cb}"
    tar -xzf "$archive" -C "$unpacked" --exclude='*/img/*' --exclude='*/inst/*' # VOC has the images
    place benchmark_RELEASE/dataset "$sbd"
  fi
  "$PYTHON" -m scripts.merge_sbd "$voc" "$sbd"
fi
check voc
