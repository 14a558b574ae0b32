//! Storage for volumes, prepared only when it was asked for: what stands in its way, said in this order and before
//! anything is changed or any program is run for it.
//!
//! 1. the distribution; 2. Secure Boot; 3. a container; 4. the package manager; 5. free space; 6. the device; 7. pools
//!    that are there already.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;

use super::zfs::{self, POOL};
use crate::host::Host;
use crate::install::preflight::Problem;
use crate::storage::{self, Backend, shown_size};

/// What the root filesystem keeps for itself beside the file of a pool: a quarter of it, or this many bytes.
const LEAST_LEFT: u64 = 10 << 30;
/// What packages of ZFS need, in bytes.
const PACKAGES: u64 = 1 << 30;
/// The smallest pool that is made, in bytes.
const SMALLEST: u64 = 1 << 30;
/// How much of a device is read at its beginning and at its end: every signature that is in use lies there.
const LOOKED_AT: usize = 4 << 20;

/// Storage that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Storage {
    /// ZFS; in a pool of this, where there is none yet.
    Zfs(Option<PoolOf>),
    /// Nothing is prepared.
    None,
}

/// What a pool is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolOf {
    /// A block device with nothing on it.
    Device(PathBuf),
    /// A file of so many bytes on the host's own filesystem.
    File(u64),
}

/// What stands in the way of storage as it was asked for, in order.
pub(in crate::install) fn problems(host: &Host, storage: Option<&Storage>) -> Vec<Problem> {
    let Some(Storage::Zfs(of)) = storage else { return Vec::new() };
    let mut problems = Vec::new();
    let mut refuse = |what: String, help: &str| problems.push(Problem::new(what, help));
    let without = "leave --storage out: volumes are directories then";
    let loaded = host.root().join("sys/module/zfs").is_dir();
    let complete = loaded && zfs::TOOLS.iter().all(|tool| host.find_tool(tool).is_some());
    let distribution = zfs::distribution(host);
    if let (Err(what), false) = (&distribution, complete) {
        refuse(format!("how ZFS is installed on {what} is not known"), without);
    }
    if !loaded && secure_boot(host) {
        refuse(
            "Secure Boot is on, and the kernel would refuse a ZFS module that is built here".into(),
            "turn it off in the firmware, or enrol a key and load the module yourself (modprobe zfs), then type this again",
        );
    }
    if let Some(kind) = container(host) {
        refuse(
            format!("this is a container ({kind}): it has no kernel of its own to load ZFS into"),
            without,
        );
    }
    if let (Ok(distribution), false) = (&distribution, complete) {
        let program = distribution.manager.program();
        if host.find_tool(program).is_none() {
            refuse(
                format!("there is no {program} to install ZFS with"),
                "install ZFS by hand, then type this again",
            );
        }
    }
    let free = free(&host.root());
    match (of, &free) {
        (_, Err(e)) => refuse(format!("how much room there is can't be told: {e}"), "look at: df -h /"),
        (Some(PoolOf::File(size)), _) if *size < SMALLEST => {
            let what = format!(
                "a pool of {} is too small: the least is {}",
                shown_size(*size),
                shown_size(SMALLEST)
            );
            refuse(what, "give it more: --pool-file 20g");
        }
        (Some(PoolOf::File(size)), Ok((total, available))) if zfs_json(host).is_none() => {
            let keeps = (total / 4).max(LEAST_LEFT);
            if available.saturating_sub(*size) < keeps {
                refuse(
                    format!(
                        "a file of {} would leave the root filesystem {} of {}, and it keeps {}",
                        shown_size(*size),
                        shown_size(available.saturating_sub(*size)),
                        shown_size(*total),
                        shown_size(keeps)
                    ),
                    "make it smaller, or use a disk of its own: --pool-device",
                );
            }
        }
        (_, Ok((_, available))) if !complete && *available < PACKAGES => {
            refuse(
                format!(
                    "ZFS needs {} of room, and there is {}",
                    shown_size(PACKAGES),
                    shown_size(*available)
                ),
                "look at: df -h /",
            );
        }
        _ => {}
    }
    if !problems.is_empty() {
        return problems;
    }
    // From here on it is asked what pools there are: on a host that can have none that was not.
    let there = match zfs::there(host) {
        Ok(there) => there,
        Err(problem) => return vec![problem],
    };
    match (there, of) {
        // What it would be made of does not matter where there is one.
        (zfs::There::Ours, _) => {}
        (zfs::There::Foreign, _) => problems.push(Problem::new(
            format!("there is a pool {POOL} that was not made by Ployz: it is not used"),
            format!("give it another name: zpool export {POOL}; zpool import {POOL} NAME"),
        )),
        (zfs::There::None, None) => problems.push(Problem::new(
            "there is no Machine Pool yet, and it was not said what to make it of",
            "say it: --pool-device /dev/disk/by-id/…, or --pool-file 20g",
        )),
        (zfs::There::None, Some(PoolOf::Device(path))) => problems.extend(used_device(path)),
        (zfs::There::None, Some(PoolOf::File(_))) => {
            let path = zfs::file(host);
            if fs::symlink_metadata(&path).is_ok() {
                problems.push(Problem::new(
                    format!("{} is there already, and is no pool that is imported", path.display()),
                    format!("import it (zpool import -d {} {POOL}), or move it away", path.display()),
                ));
            }
        }
    }
    problems
}

/// What would be done, for people.
pub(in crate::install) fn plan(host: &Host, storage: Option<&Storage>) -> Option<String> {
    let Some(Storage::Zfs(of)) = storage else { return None };
    if zfs_json(host).is_some() {
        return None;
    }
    Some(match of {
        None => "the Machine Pool that is there is taken up".into(),
        Some(PoolOf::Device(path)) => {
            format!("ZFS is prepared, and a pool {POOL} made of {}", path.display())
        }
        Some(PoolOf::File(size)) => {
            format!("ZFS is prepared, and a pool {POOL} made of a file of {}", shown_size(*size))
        }
    })
}

/// The Machine Pool, where it was prepared already.
pub(super) fn zfs_json(host: &Host) -> Option<storage::Pool> {
    match storage::read(host) {
        Ok(Backend::Zfs(pool)) => Some(pool),
        _ => None,
    }
}

/// Whether the firmware only lets signed modules be loaded: the last byte of its variable.
fn secure_boot(host: &Host) -> bool {
    let variable = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    fs::read(host.root().join(variable)).is_ok_and(|bytes| bytes.last() == Some(&1))
}

/// What kind of container this is, if it is one.
fn container(host: &Host) -> Option<String> {
    let root = host.root();
    if root.join("proc/vz").is_dir() && !root.join("proc/bc").is_dir() {
        return Some("OpenVZ".into());
    }
    if let Ok(kind) = fs::read_to_string(root.join("run/systemd/container")) {
        return Some(crate::text::printable(&kind));
    }
    let map = fs::read_to_string(root.join("proc/self/uid_map")).unwrap_or_default();
    let words: Vec<&str> = map.split_whitespace().collect();
    (!words.is_empty() && words != ["0", "0", "4294967295"]).then(|| "unprivileged".into())
}

/// The size of a filesystem, and what root may still use, in bytes.
fn free(path: &Path) -> io::Result<(u64, u64)> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    let block = stat.fragment_size();
    Ok((stat.blocks() * block, stat.blocks_available() * block))
}

/// Why a device can't be made a pool: it is none, it is in use, or there is something on it.
fn used_device(path: &Path) -> Option<Problem> {
    let shown = path.display();
    let problem = |what: String, help: &str| Some(Problem::new(what, help));
    let look = "look at it: lsblk -f";
    match fs::metadata(path) {
        Err(e) => return problem(format!("looking at {shown}: {e}"), look),
        Ok(meta) if !meta.file_type().is_block_device() => {
            return problem(format!("{shown} is no block device"), look);
        }
        Ok(meta) => {
            let (major, minor) = (nix::sys::stat::major(meta.rdev()), nix::sys::stat::minor(meta.rdev()));
            let parts = partitions(Path::new(&format!("/sys/dev/block/{major}:{minor}")));
            if !parts.is_empty() {
                return problem(format!("{shown} has partitions ({})", parts.join(", ")), look);
            }
        }
    }
    // Whoever mounted it, swaps to it or has built something on it holds it exclusively.
    let opened = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(path);
    let mut device = match opened {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            return problem(format!("{shown} is in use"), "see by whom: lsblk -f; fuser -v; cat /proc/swaps");
        }
        Err(e) => return problem(format!("opening {shown}: {e}"), look),
        Ok(device) => device,
    };
    match is_blank(&mut device) {
        Ok(true) => None,
        Ok(false) => problem(
            format!("{shown} is not blank: there is something on it, and it is not touched"),
            "see what: wipefs --no-act; if it is nothing, empty it by hand: blkdiscard -z, or wipefs --all and dd",
        ),
        Err(e) => problem(format!("reading {shown}: {e}"), look),
    }
}

fn partitions(sys: &Path) -> Vec<String> {
    let entries = fs::read_dir(sys).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.path().join("partition").exists());
    parts.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Whether there is nothing at the beginning and at the end.
fn is_blank(device: &mut (impl Read + Seek)) -> io::Result<bool> {
    let length = device.seek(SeekFrom::End(0))?;
    let mut buffer = vec![0; LOOKED_AT];
    for from in [0, length.saturating_sub(LOOKED_AT as u64)] {
        device.seek(SeekFrom::Start(from))?;
        let mut read = 0;
        while read < buffer.len() {
            match device.read(&mut buffer[read..])? {
                0 => break,
                n => read += n,
            }
        }
        if buffer[..read].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Cursor;

    use super::*;

    /// A Debian 13 with apt, on which any program that is run is a failure of the test.
    fn debian() -> (tempfile::TempDir, Host) {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        for dir in ["etc", "usr/bin", "proc/self", "run/systemd", "sys/firmware/efi/efivars"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        fs::write(root.path().join("etc/os-release"), "ID=debian\nVERSION_ID=\"13\"\n").unwrap();
        for tool in ["apt-get", "zpool", "zfs", "modprobe", "modinfo", "dpkg"] {
            let path = root.path().join("usr/bin").join(tool);
            fs::write(&path, format!("#!/bin/sh\necho {tool} >>{}/ran\n", root.path().display())).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        (root, host)
    }

    #[test]
    fn what_stands_in_the_way_is_said_in_order_and_nothing_is_run_for_it() {
        let asked = Storage::Zfs(Some(PoolOf::File(1 << 60)));
        let (root, host) = debian();
        let said = || -> Vec<String> {
            let found = problems(&host, Some(&asked)).into_iter().map(|problem| problem.what).collect();
            assert!(!root.path().join("ran").exists(), "something was run");
            found
        };
        let write = |path: &str, bytes: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        let space = "a file of 1048576 TiB would leave the root filesystem";
        let starts = |expected: &[&str]| {
            let found = said();
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.starts_with(expected), "{found} / {expected}");
            }
        };
        starts(&[space]);
        fs::remove_file(root.path().join("usr/bin/apt-get")).unwrap();
        starts(&["there is no apt-get", space]);
        write("run/systemd/container", b"systemd-nspawn\n");
        starts(&["this is a container (systemd-nspawn)", "there is no apt-get", space]);
        write("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", &[6, 0, 0, 0, 1]);
        starts(&["Secure Boot is on", "this is a container", "there is no apt-get", space]);
        write("etc/os-release", b"ID=fedora\nVERSION_ID=42\n");
        starts(&["how ZFS is installed on fedora 42", "Secure Boot is on", "this is a container", space]);
        write("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", &[6, 0, 0, 0, 0]);
        fs::remove_file(root.path().join("run/systemd/container")).unwrap();
        write("proc/self/uid_map", b"         0     100000      65536\n");
        starts(&["how ZFS is installed on fedora 42", "this is a container (unprivileged)", space]);
        write("proc/self/uid_map", b"         0          0 4294967295\n");
        fs::create_dir_all(root.path().join("proc/vz")).unwrap();
        starts(&["how ZFS is installed on fedora 42", "this is a container (OpenVZ)", space]);
        fs::create_dir_all(root.path().join("proc/bc")).unwrap();
        starts(&["how ZFS is installed on fedora 42", space]);
        assert!(problems(&host, None).is_empty() && problems(&host, Some(&Storage::None)).is_empty());
    }

    #[test]
    fn a_pool_has_to_be_made_of_something_that_is_named() {
        let (_root, host) = debian();
        let of = |of: Option<PoolOf>| problems(&host, Some(&Storage::Zfs(of))).remove(0).what;
        assert!(of(None).starts_with("there is no Machine Pool yet"));
        assert!(of(Some(PoolOf::File(1 << 20))).starts_with("a pool of 1 MiB is too small"));
        assert!(of(Some(PoolOf::Device("/dev/null".into()))).contains("is no block device"));
        assert!(of(Some(PoolOf::Device("/nowhere".into()))).contains("No such file"));
    }

    #[test]
    fn a_disk_with_anything_at_its_ends_is_not_blank() {
        let mut disk = vec![0u8; 3 * LOOKED_AT];
        let blank = |disk: &[u8]| is_blank(&mut Cursor::new(disk.to_vec())).unwrap();
        assert!(blank(&disk));
        assert!(blank(&disk[..100]), "a short one");
        for at in [0, 1080, 65600, LOOKED_AT - 1, 3 * LOOKED_AT - 512, 3 * LOOKED_AT - 1] {
            disk[at] = 1;
            assert!(!blank(&disk), "{at}");
            disk[at] = 0;
        }
    }
}
