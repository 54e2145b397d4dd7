#!/bin/bash
# Becomes the systemd of a small container: run by systemd_host.py in namespaces of its own (mounts, processes, network,
# host name, IPC, control groups), so nothing here is seen outside, and all of it ends with its first process.
# $1: an empty directory. Its neighbours beneath /opt, as HIDDEN:SHOWN pairs in the other arguments.
set -eu
base=$1
root=$base/root
shift

mount --make-rprivate /
mount -t tmpfs tmpfs "$base"
mkdir "$base/upper" "$base/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"

mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys" # some of these settings are the whole machine's
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for directory in dev/shm run tmp; do
    mount -t tmpfs tmpfs "$root/$directory"
done
for pair; do # a service does not see /root, /home and /tmp; what it runs has to be elsewhere
    mkdir -p "$root${pair#*:}"
    mount --bind "${pair%%:*}" "$root${pair#*:}"
done

units=$root/etc/systemd/system
rm -rf "$units"/*.wants
ln -sf /lib/systemd/system/multi-user.target "$units/default.target"
for unit in getty.target systemd-logind systemd-udevd systemd-timesyncd systemd-networkd systemd-resolved; do
    case $unit in *.target) ;; *) unit=$unit.service ;; esac
    ln -sf /dev/null "$units/$unit"
done

mkdir "$root/old"
cd "$root"
pivot_root . old
umount -l /old
export container=lxc
exec chroot . /lib/systemd/systemd --system --log-target=console --show-status=0 </dev/null
