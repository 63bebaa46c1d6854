#!/usr/bin/env bash
# A file system whose files can share data, in an image file: XFS with reflink, loop-mounted.
#   tools/reflink_image.sh make IMAGE SIZE MOUNT_POINT     sparse image of SIZE, such as 40G, mounted
#   tools/reflink_image.sh remove IMAGE MOUNT_POINT        unmounts it and deletes the image
# The loop device reads the image with direct I/O, so that its pages are not cached a second time.
# Needs root, losetup (util-linux), mkfs.xfs (xfsprogs) and a kernel with XFS.
set -euo pipefail

BLOCK=4096

fail() {
  echo "reflink_image.sh: $1" >&2
  exit 2
}

require() {
  command -v "$1" >/dev/null || fail "$1 is missing; install $2"
}

check_machine() {
  [ "$(id -u)" -eq 0 ] || fail "mounting needs root: got user $(id -un); run it with sudo"
  require losetup util-linux
  require mkfs.xfs xfsprogs
  [ -e /dev/loop-control ] || fail "there are no loop devices here; load the module loop"
  grep -qw xfs /proc/filesystems || modprobe xfs 2>/dev/null ||
    fail "this kernel has no XFS; load the module xfs"
}

undo() {
  umount "$2" 2>/dev/null || true
  for device in $(losetup --noheadings --output NAME --associated "$1" 2>/dev/null); do
    losetup --detach "$device" || true
  done
  rm -f "$1"
  rmdir "$2" 2>/dev/null || true
}

make() {
  local image=$1 size=$2 mount_point=$3 device
  [ ! -e "$image" ] || fail "image $image exists; remove it or choose another name"
  ! mountpoint -q "$mount_point" || fail "$mount_point is a mount point already; choose another"
  trap 'undo "$image" "$mount_point"' ERR
  mkdir -p "$mount_point"
  truncate -s "$size" "$image"
  mkfs.xfs -q -m reflink=1 -s size=$BLOCK "$image"
  device=$(losetup --find --show --sector-size $BLOCK --direct-io=on "$image")
  if [ "$(cat "/sys/block/${device#/dev/}/loop/dio")" != 1 ]; then
    echo "reflink_image.sh: no direct I/O below $image; its pages are cached twice" >&2
  fi
  mount -t xfs "$device" "$mount_point"
  trap - ERR
  echo "$mount_point: $size of XFS with reflink on $device"
}

remove() {
  local image=$1 mount_point=$2
  [ -f "$image" ] || fail "there is no image $image; give the one that was made"
  [ "$(head -c 4 "$image" | tr -d '\0')" = XFSB ] ||
    fail "$image is no image of XFS; give the one that was made"
  if mountpoint -q "$mount_point"; then
    umount "$mount_point" || fail "$mount_point is in use; end what works there"
  fi
  for device in $(losetup --noheadings --output NAME --associated "$image"); do
    ! grep -q "^$device " /proc/mounts || fail "$image is still mounted from $device; unmount it"
  done
  undo "$image" "$mount_point"
}

case "${1-} $#" in
  "make 4")
    check_machine
    make "$2" "$3" "$4"
    ;;
  "remove 3")
    check_machine
    remove "$2" "$3"
    ;;
  *)
    sed -n "2,5s/^# \{0,1\}//p" "$0" >&2
    exit 2
    ;;
esac
