#!/bin/bash
# Moves Docker's and containerd's folders to the instance's local NVMe disks, at each boot before the two services.
# A step that fails leaves them on the root volume and says so: nothing may keep the instance from its cluster.
# `local-disks undo` moves them back.
shopt -s nullglob
# A label of XFS has 12 characters at most.
label=ray-on-ecs array=/dev/md/ray-on-ecs mounted=/mnt/local-disks
say() { echo "local disks: $*" | tee /var/lib/ray-on-ecs/local-disks; }
# Ends all mounts of a device, and its array: the next boot takes its disks for empty then.
release() {
  local members=("/sys/block/$(basename "$(readlink -f "$1")")"/slaves/*)
  umount -qA "$1"
  wipefs -aq "$1"
  ((${#members[@]})) || return
  mdadm --stop "$1"
  wipefs -aq "${members[@]/#*\//\/dev\/}"
}
stay() {
  [[ ! $device ]] || release "$device"
  say "$*; Docker stays on the root volume"
  exit
}

disks=() empty=() device=
if [[ $1 == undo ]]; then
  device=$(findmnt -no SOURCE "$mounted") || exit
  systemctl stop docker.socket docker containerd
  stay "Docker did not start on $device"
fi

mkdir -p /var/lib/ray-on-ecs "$mounted" /var/lib/docker /var/lib/containerd

# EBS volumes have the model `Amazon Elastic Block Store`.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ssd-instance-store.html
for model in /sys/block/*/device/model; do
  disk=/dev/$(basename "${model%/device/model}")
  grep -q '^Amazon EC2 NVMe Instance Storage' "$model" && [[ -b $disk ]] && disks+=("$disk")
done
((${#disks[@]})) || stay "the instance has none"

# After a reboot they are as they were, and after a stop they are empty.
if ((${#disks[@]} > 1)) && command -v mdadm > /dev/null; then
  udevadm settle --timeout=10
  mdadm --assemble "$array" "${disks[@]}" 2> /dev/null # if udev has not
fi
is_empty() {
  blkid -p "$1" > /dev/null 2>&1
  (($? == 2)) # it finds neither a file system nor partitions
}
of() { blkid -p -s "$1" -o value "$2" 2> /dev/null; }
for disk in "${disks[@]}" /dev/md[0-9]*; do
  [[ $(of TYPE "$disk") != xfs || $(of LABEL "$disk") != "$label" ]] || device=$disk
done
if [[ ! $device ]]; then
  # An earlier boot has ended before mkfs.
  [[ ! -b $array ]] || ! is_empty "$array" || release "$array"
  for disk in "${disks[@]}"; do
    ! is_empty "$disk" || empty+=("$disk")
  done
  ((${#empty[@]})) || stay "${disks[*]} are not empty"
  chosen=${empty[0]}
  if ((${#empty[@]} > 1)); then
    command -v mdadm > /dev/null || timeout 60 dnf install -qy mdadm
    if mdadm --create "$array" --run --homehost=any --name="$label" --level=0 \
      --raid-devices="${#empty[@]}" "${empty[@]}"; then
      chosen=$array
    else
      say "mdadm failed; of ${#empty[@]} disks one is used"
      mdadm --stop "$array"
      wipefs -aq "${empty[@]}"
    fi
  fi
  device=$chosen
  # So Docker always has the room of the root volume, which its setting says.
  (($(blockdev --getsize64 "$device") >= $(df -B1 --output=size /var/lib/docker | tail -n 1))) ||
    stay "$device is smaller than the root volume"
  # EC2's disks are trimmed already, which would take minutes.
  mkfs.xfs -qKL "$label" "$device" || stay "mkfs.xfs failed on $device"
fi
mount -o noatime "$device" "$mounted" || stay "$device can't be mounted"

# At the first boot they may be up, and at others they wait for this unit.
if systemctl is-active docker containerd | grep -qvE '^(inactive|failed|unknown)$'; then
  systemctl stop docker.socket docker containerd || stay "Docker can't be stopped"
fi
for folder in containerd docker; do
  from=/var/lib/$folder to=$mounted/$folder
  if [[ ! -d $to ]]; then
    rm -rf "$to.new"
    { cp -a "$from" "$to.new" && mv "$to.new" "$to"; } || stay "$from can't be copied to $device"
  fi
  mount --bind "$to" "$from" || stay "$from can't be moved to $device"
done
say "Docker's files are on $device, $(($(blockdev --getsize64 "$device") / 10 ** 9)) GB"
