//! Volumes as ZFS datasets: `POOL/volumes/NAME`, whose quota is the volume's size. Each is `mountpoint=legacy`, and PID 1
//! mounts it: what this process mounted, the host and Docker would not see.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::protocol::{Trouble, Volume, is_name};
use super::using::{self, mount_at};
use crate::command::{CommandError, Run};
use crate::durable::make_dir;
use crate::host::Host;
use crate::storage::Pool;
use crate::text::printable;

/// For one call of zfs.
const CALL: Duration = Duration::from_secs(20);
/// For a dataset that is busy for a moment, and between two tries.
const BUSY: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(250);
/// All volumes that one list shows, in bytes of text.
const MOST_LIST: usize = 4 * 1024 * 1024;

fn dataset(pool: &Pool, name: &str) -> String {
    format!("{}/{name}", pool.dataset)
}

/// What keeps a pool from being asked, as far as it can be seen.
fn away(pool: &Pool, said: &str) -> Trouble {
    let said = printable(said);
    Trouble::Unknown(if !Path::new("/sys/module/zfs").is_dir() {
        let refused =
            ["Required key not available", "Key was rejected"].iter().any(|text| said.contains(text));
        if refused {
            format!(
                "the kernel refuses the ZFS module, which is not signed with a key that it trusts: mokutil --sb-state ({said})"
            )
        } else {
            format!("the ZFS module is not loaded: modprobe zfs ({said})")
        }
    } else if said.contains("no such pool") || said.contains("does not exist") {
        format!("pool {} is not imported: zpool import {}", pool.pool, pool.pool)
    } else {
        format!("zfs can't be asked: {said}")
    })
}

/// The volumes below the pool's dataset, or the one of a name.
fn list(pool: &Pool, name: Option<&str>) -> Result<Vec<Volume>, Trouble> {
    let of = name.map_or_else(|| pool.dataset.clone(), |name| dataset(pool, name));
    let depth: &[&str] = if name.is_some() { &[] } else { &["-r", "-d", "1"] };
    let words = ["list", "-H", "-p", "-t", "filesystem", "-o", "name,quota,creation,mountpoint"];
    let run = Run::new("zfs", CALL).args(words.iter().chain(depth)).args([&of]).most_output(MOST_LIST);
    let ended = run.run().map_err(|e| away(pool, &e.to_string()))?;
    if !ended.status.success() {
        // The dataset above is there whenever the pool is: without it nothing is known of those below.
        if name.is_some() && ended.stderr.contains("dataset does not exist") && is_there(pool)? {
            return Ok(Vec::new());
        }
        return Err(away(pool, &ended.stderr));
    }
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    Ok(text.lines().filter_map(|line| read(pool, line)).collect())
}

/// Whether the dataset of volumes is there.
fn is_there(pool: &Pool) -> Result<bool, Trouble> {
    let run = Run::new("zfs", CALL).args(["list", "-H", "-o", "name", &pool.dataset]);
    let ended = run.run().map_err(|e| away(pool, &e.to_string()))?;
    if ended.status.success() { Ok(true) } else { Err(away(pool, &ended.stderr)) }
}

/// A line of the list; none for what is no volume of ours.
fn read(pool: &Pool, line: &str) -> Option<Volume> {
    let mut fields = line.split('\t');
    let (full, quota, created) = (fields.next()?, fields.next()?, fields.next()?);
    let name = full.strip_prefix(&pool.dataset)?.strip_prefix('/').filter(|name| is_name(name))?;
    if fields.next() != Some("legacy") {
        return None;
    }
    Some(Volume {
        name: name.to_owned(),
        mountpoint: None,
        size: quota.parse().ok().filter(|bytes| *bytes > 0),
        created: created.parse().unwrap_or_default(),
        backend: "zfs",
    })
}

/// The volume of this name, if there is one.
pub(super) fn find(pool: &Pool, name: &str) -> Result<Option<Volume>, Trouble> {
    Ok(list(pool, Some(name))?.pop())
}

/// All of them.
pub(super) fn all(pool: &Pool) -> Result<Vec<Volume>, Trouble> {
    list(pool, None)
}

/// The same with where it is mounted. A path is told only while the volume's own dataset is what is there.
pub(super) fn mounted(host: &Host, pool: &Pool, volume: Volume) -> Volume {
    let point = host.volumes().join(&volume.name);
    let there = mount_at(host, &point).ok().flatten();
    let is_it = there.is_some_and(|mount| mount.kind == "zfs" && mount.source == dataset(pool, &volume.name));
    Volume { mountpoint: is_it.then_some(point), ..volume }
}

/// Makes a dataset with its quota, in one step.
pub(super) fn create(host: &Host, pool: &Pool, name: &str, size: Option<u64>) -> Result<(), Trouble> {
    let full = dataset(pool, name);
    let mut words = vec!["create".to_owned(), "-o".into(), "mountpoint=legacy".into()];
    if let Some(bytes) = size {
        words.extend(["-o".into(), format!("quota={bytes}")]);
    }
    words.push(full);
    Run::new("zfs", CALL)
        .args(words)
        .check()
        .map_err(|e| failed(pool, &format!("making volume {name}"), &e))?;
    make_dir(&host.volumes(), 0o711).map_err(|e| Trouble::No(format!("making {:?}: {e}", host.volumes())))
}

fn failed(pool: &Pool, what: &str, e: &CommandError) -> Trouble {
    match e {
        CommandError::Status { stderr, .. } if stderr.contains("no such pool") => away(pool, stderr),
        CommandError::Status { stderr, .. } => Trouble::No(format!("{what}: {}", printable(stderr))),
        e => Trouble::Unknown(format!("{what}: {e}")),
    }
}

/// Mounts a volume, and looks that it is what is there now.
pub(super) fn mount(host: &Host, pool: &Pool, name: &str) -> Result<PathBuf, Trouble> {
    let (point, full) = (host.volumes().join(name), dataset(pool, name));
    let unknown = |e: std::io::Error| Trouble::Unknown(format!("reading the mounts: {e}"));
    let foreign = |kind: &str, source: &str| {
        Trouble::No(format!("{} is {kind} {source:?}, not volume {name}: umount it", point.display()))
    };
    match mount_at(host, &point).map_err(unknown)? {
        Some(mount) if mount.kind == "zfs" && mount.source == full => return Ok(point),
        Some(mount) => return Err(foreign(&mount.kind, &mount.source)),
        None => {}
    }
    make_dir(&host.volumes(), 0o711)
        .and_then(|()| make_dir(&point, 0o000))
        .map_err(|e| Trouble::No(format!("making {}: {e}", point.display())))?;
    let on = point.to_string_lossy().into_owned();
    let done = by_pid_1(&["mount", "-t", "zfs", "--", &full, &on]);
    match mount_at(host, &point).map_err(unknown)? {
        Some(mount) if mount.kind == "zfs" && mount.source == full => Ok(point),
        Some(mount) => Err(foreign(&mount.kind, &mount.source)),
        None => Err(match done {
            Ok(()) => Trouble::No(format!("mount succeeded, and volume {name} is not mounted all the same")),
            Err(e) => Trouble::No(format!("mounting volume {name}: {e}")),
        }),
    }
}

/// Unmounts a volume from the host; never lazily, and never by force.
pub(super) fn unmount(host: &Host, pool: &Pool, name: &str) -> Result<(), String> {
    let point = host.volumes().join(name);
    let is_it = |mount: &using::Mount| mount.kind == "zfs" && mount.source == dataset(pool, name);
    if mount_at(host, &point).map_err(|e| e.to_string())?.is_none_or(|mount| !is_it(&mount)) {
        return Ok(());
    }
    by_pid_1(&["umount", "--", &point.to_string_lossy()])?;
    match mount_at(host, &point).map_err(|e| e.to_string())? {
        Some(mount) if is_it(&mount) => Err("it is mounted twice".into()),
        _ => Ok(()),
    }
}

/// Destroys a dataset, and looks. One that is busy is tried again for a moment; then who holds it is named.
pub(super) fn remove(host: &Host, pool: &Pool, name: &str) -> Result<(), Trouble> {
    let (point, full) = (host.volumes().join(name), dataset(pool, name));
    let started = Instant::now();
    let why = loop {
        let unmounted = unmount(host, pool, name);
        let destroyed = Run::new("zfs", CALL).args(["destroy", "--", &full]).check();
        let why = match (unmounted, destroyed) {
            (_, Ok(_)) => break None,
            (Err(why), _) => why,
            (Ok(()), Err(CommandError::Status { stderr, .. })) => printable(&stderr),
            (Ok(()), Err(e)) => return Err(Trouble::Unknown(format!("removing volume {name}: {e}"))),
        };
        if !why.contains("busy") || started.elapsed() >= BUSY {
            break Some(why);
        }
        std::thread::sleep(AGAIN);
    };
    match (find(pool, name)?, why) {
        (None, _) => {
            let _ = fs::remove_dir(point);
            Ok(())
        }
        (Some(_), why) => {
            let why = why.unwrap_or_else(|| "zfs destroy succeeded, and it is there all the same".into());
            let holders = using::of_dataset(host, &full);
            let by =
                if holders.is_empty() { String::new() } else { format!(", held by {}", holders.join(", ")) };
            Err(Trouble::No(format!("volume {name} was not removed{by}: {why}")))
        }
    }
}

/// Has PID 1 run a program of the host, outside of this unit and its view of the mounts.
fn by_pid_1(command: &[&str]) -> Result<(), String> {
    let words = ["--quiet", "--collect", "--wait", "--pipe", "--service-type=oneshot"];
    let described = format!("--description=Ployz volume: {}", command.join(" "));
    let run = Run::new("systemd-run", CALL).args(words).args([&described]).args(["--"]).args(command);
    match run.check() {
        Ok(_) => Ok(()),
        Err(CommandError::Status { stderr, .. }) if !stderr.trim().is_empty() => Err(printable(&stderr)),
        Err(e) => Err(e.to_string()),
    }
}
