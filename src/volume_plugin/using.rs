//! Who uses a volume: the ids under which Docker mounted it, which end with the boot as the mounts do; and the processes
//! that have it mounted in a namespace of their own, which keep it from being removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::durable::make_dir;
use crate::host::Host;
use crate::text::printable;

/// How many holders are named.
const MOST_NAMED: usize = 5;

/// A line of `/proc/PID/mountinfo` (proc(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    device: String,
    root: PathBuf,
    pub(super) point: PathBuf,
    pub(super) kind: String,
    pub(super) source: String,
}

/// Notes that a volume is mounted under an id; again is once.
pub(super) fn note(host: &Host, name: &str, id: &str) -> io::Result<()> {
    let dir = host.volume_users().join(name);
    make_dir(&dir, 0o700)?;
    fs::write(dir.join(id), [])
}

/// Forgets an id; one that is not known is forgotten already.
pub(super) fn forget(host: &Host, name: &str, id: &str) {
    let dir = host.volume_users().join(name);
    let _ = fs::remove_file(dir.join(id));
    let _ = fs::remove_dir(dir);
}

/// Forgets all ids of a volume.
pub(super) fn forget_all(host: &Host, name: &str) {
    let _ = fs::remove_dir_all(host.volume_users().join(name));
}

/// Whether no id is known of a volume. What can't be read counts as used.
pub(super) fn is_unused(host: &Host, name: &str) -> bool {
    match fs::read_dir(host.volume_users().join(name)) {
        Ok(mut entries) => entries.next().is_none(),
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    }
}

/// What is mounted at a path, in PID 1's view: this process may have a view of its own.
pub(super) fn mount_at(host: &Host, path: &Path) -> io::Result<Option<Mount>> {
    let mounts = if host.privileged() {
        fs::read_to_string("/proc/1/mountinfo")?
    } else {
        fs::read_to_string("/proc/self/mountinfo")?
    };
    // The last one covers those before it.
    Ok(mounts.lines().filter_map(read).rfind(|mount| mount.point == path))
}

fn read(line: &str) -> Option<Mount> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(2);
    let (device, root, point) = (front.next()?, front.next()?, front.next()?);
    let mut back = back.split(' ');
    let (kind, source) = (back.next()?, back.next()?);
    Some(Mount {
        device: device.to_owned(),
        root: unescaped(root),
        point: unescaped(point),
        kind: kind.to_owned(),
        source: unescaped(source).to_string_lossy().into_owned(),
    })
}

/// Octal escapes of proc(5): a space is `\040`.
fn unescaped(text: &str) -> PathBuf {
    let mut rest = text;
    let mut out = String::new();
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &rest[at + 4..];
            }
            None => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    PathBuf::from(out)
}

/// Processes that have a directory of this host mounted somewhere, as a container has its volumes.
pub(super) fn of_directory(host: &Host, path: &Path) -> Vec<String> {
    let Ok(own) = fs::read_to_string("/proc/self/mountinfo") else { return Vec::new() };
    let mounts: Vec<Mount> = own.lines().filter_map(read).collect();
    let below = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    let Some(holding) = below.max_by_key(|mount| mount.point.as_os_str().len()) else { return Vec::new() };
    let Ok(inside) = path.strip_prefix(&holding.point) else { return Vec::new() };
    let root = holding.root.join(inside);
    holders(host, &|mount| mount.device == holding.device && mount.root == root)
}

/// Processes that have a dataset mounted in a namespace of their own.
pub(super) fn of_dataset(host: &Host, dataset: &str) -> Vec<String> {
    holders(host, &|mount| mount.kind == "zfs" && mount.source == dataset)
}

/// Processes whose mounts differ from PID 1's and have one of these: `process 812 (nginx)`.
fn holders(host: &Host, is_one: &dyn Fn(&Mount) -> bool) -> Vec<String> {
    if !host.privileged() {
        return Vec::new();
    }
    let own = fs::read_link("/proc/self/ns/mnt").ok();
    let first = fs::read_link("/proc/1/ns/mnt").ok();
    let (mut seen, mut found) = (Vec::new(), Vec::new());
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.bytes().all(|b| b.is_ascii_digit()) {
            continue;
        }
        let namespace = fs::read_link(entry.path().join("ns/mnt")).ok();
        if namespace.is_none() || namespace == own || namespace == first || seen.contains(&namespace) {
            continue;
        }
        let mounts = fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        // Other services of the host have its mounts too, as slaves: theirs go with it.
        let is_slave = |line: &str| line.split(' ').any(|word| word.starts_with("master:"));
        let holds = |line: &&str| !is_slave(line) && read(line).is_some_and(|mount| is_one(&mount));
        seen.push(namespace);
        if mounts.lines().any(|line| holds(&line)) {
            let command = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            found.push(format!("process {name} ({})", printable(&command)));
            if found.len() == MOST_NAMED {
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read() {
        let line =
            "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - zfs ployz/volumes/data rw,errors=continue";
        let mount = read(line).unwrap();
        assert_eq!(mount.point, Path::new("/mnt 2"));
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("zfs", "ployz/volumes/data"));
        assert_eq!(read("36 35 98:0"), None);
        assert_eq!(unescaped("a\\"), Path::new("a\\"));
        assert_eq!(unescaped("\\9é"), Path::new("\\9é"));
    }

    #[test]
    fn an_id_counts_once_and_can_be_forgotten_twice() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        assert!(is_unused(&host, "data"));
        for id in ["a", "a", "b"] {
            note(&host, "data", id).unwrap();
        }
        forget(&host, "data", "a");
        forget(&host, "data", "a");
        assert!(!is_unused(&host, "data"));
        forget(&host, "data", "b");
        assert!(is_unused(&host, "data"));
    }
}
