#!/usr/bin/env bash
# Copy the checkout's tracked files, as they are now, to code_snapshots/NAME and print that folder:
#
#   cd "$(tools/code_snapshot.sh NAME)"
#
# An existing snapshot is not changed, so that all jobs of one experiment run the same code.
set -euo pipefail
if (($# != 1)) || [[ ! $1 =~ ^[A-Za-z0-9._-]+$ ]]; then
  echo "usage: tools/code_snapshot.sh NAME   (letters, digits, dots, dashes, underscores)" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
snapshot=$PWD/code_snapshots/$1
if [[ ! -d $snapshot ]]; then
  partial=$(mktemp -d "$(mkdir -p code_snapshots && echo code_snapshots)/.partial.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  # Tracked files that have been deleted cannot be copied.
  git ls-files -z | while IFS= read -r -d '' file; do
    [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
  done | tar --create --null --files-from=- | tar --extract --directory="$partial"
  git rev-parse HEAD > "$partial/COMMIT"
  chmod 755 "$partial"
  # Another process may have made it in the meantime.
  mv --no-target-directory "$partial" "$snapshot" 2> /dev/null || [[ -d $snapshot ]]
fi
echo "$snapshot"
