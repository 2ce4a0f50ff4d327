# Sourced by the download scripts: fetches archives so that they can be resumed, are verified, and unpack whole or not at all.
# Once <folder>/<file> is there it has been verified, or you have put it there; a download under way is called <file>.part.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

fail() {
  echo "error: $1" >&2
  exit 1
}

begin() { # the script, then what the user typed; sets `folder`
  local script="scripts/${1##*/}"
  folder="${2:-}"
  if [ -z "$folder" ] || [ "$folder" = -h ] || [ "$folder" = --help ]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "$script"
    [ -n "$folder" ] && exit 0
    exit 2 # no folder: the usage is an error message
  fi
  case "$folder" in /*) ;; *) folder="$called_from/$folder" ;; esac
  install requirements.txt
  mkdir -p "$folder"
  unpacked="$(mktemp -d "$folder/.unpack.XXXXXX")"
  trap 'rm -rf "$unpacked"' EXIT
}

has_md5() { # file, md5
  [ "$("$PYTHON" -c 'import hashlib, sys; print(hashlib.file_digest(open(sys.argv[1], "rb"), "md5").hexdigest())' "$1")" = "$2" ]
}

is_zip() { unzip -tqq "$1" >/dev/null 2>&1; }

fetch() { # url, then a command that, given a file, says whether it is whole; leaves the archive in `archive`
  local url="$1" part code=0 attempt meter=--silent
  shift
  [ ! -t 2 ] || meter=--progress-bar
  archive="$folder/${url##*/}" part="$folder/${url##*/}.part"
  if [ -e "$archive" ]; then
    echo "verifying $archive ..."
    whole "$archive" "$@" || fail "$archive is damaged or another version; delete it to have it fetched from $url"
    return
  fi
  if ! { [ -s "$part" ] && whole "$part" "$@"; }; then
    for attempt in 1 2 3 4 5; do
      [ -s "$part" ] && echo "resuming $url ..." || echo "fetching $url ..."
      code=0
      curl --fail --location --continue-at - --connect-timeout 30 --speed-time 60 --speed-limit 1 \
        $meter --show-error --output "$part" "$url" || code=$?
      case "$code" in
        18 | 28 | 52 | 56 | 92) sleep "${RETRY_SECONDS:-5}" ;; # cut on the way: resume from there
        33) rm -f "$part" ;;                                   # this server cannot resume: begin again
        *) break ;;
      esac
    done
    [ "$code" -eq 0 ] || fail "$url could not be fetched (curl ended with $code). What has come is kept and the same command resumes from there.
Without a network: put the file there yourself, as $archive; the same command then verifies and unpacks it."
    echo "verifying ..."
    if ! whole "$part" "$@"; then
      rm -f "$part"
      fail "what came from $url is damaged or another version, and was deleted; try again later or put the file there yourself, as $archive"
    fi
  fi
  mv "$part" "$archive"
}

whole() { # file, then the command that judges it
  local file="$1" judge="$2"
  "$judge" "$file" "${@:3}"
}

place() { # what was unpacked, where it belongs
  [ -e "$unpacked/$1" ] || fail "$archive holds no $1; it is not the archive it should be"
  mkdir -p "$(dirname "$2")"
  mv "$unpacked/$1" "$2"
  echo "unpacked: $2"
}

check() { # data set: the last thing a download script does
  "$PYTHON" -m scripts.check_data "$folder" --dataset "$1"
}
