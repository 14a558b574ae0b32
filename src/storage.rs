//! Where this Machine keeps its volumes: a file that the installer writes once storage is prepared, and that the volume
//! plugin, the daemon and `doctor` read. Without it volumes are directories.

use std::io;

use serde::{Deserialize, Serialize};

use crate::durable::read_bounded;
use crate::host::Host;

const SCHEMA: u32 = 1;
const MOST: usize = 16 * 1024;

/// Where volumes are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Directories of the host's own filesystem.
    Directory,
    /// Datasets of a ZFS pool.
    Zfs(Pool),
}

/// The Machine Pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pool {
    /// Its name.
    pub(crate) pool: String,
    /// The dataset whose children are volumes: `ployz/volumes`.
    pub(crate) dataset: String,
}

#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    backend: String,
    #[serde(flatten)]
    pool: Pool,
}

/// What was prepared here.
///
/// # Errors
/// When that can't be told: the file can't be read, or is not understood. Then nothing may be concluded of volumes.
pub(crate) fn read(host: &Host) -> Result<Backend, String> {
    let path = host.storage_json();
    let shown = path.display();
    let text = match read_bounded(&path, MOST) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Backend::Directory),
        Err(e) => return Err(format!("reading {shown}: {e}")),
    };
    let file: File = serde_json::from_slice(&text).map_err(|e| format!("{shown} is not understood: {e}"))?;
    if file.schema > SCHEMA || file.backend != "zfs" {
        return Err(format!(
            "{shown} was written by a newer release ({}, schema {})",
            file.backend, file.schema
        ));
    }
    let plain = |name: &str| {
        name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./:".contains(&b)) && !name.starts_with('-')
    };
    let Pool { pool, dataset } = &file.pool;
    if !plain(pool) || !plain(dataset) || !dataset.starts_with(&format!("{pool}/")) {
        return Err(format!("{shown} names no dataset of a pool"));
    }
    Ok(Backend::Zfs(file.pool))
}

/// The text of the file for a pool.
pub(crate) fn text(pool: &Pool) -> Vec<u8> {
    let file = File { schema: SCHEMA, backend: "zfs".into(), pool: pool.clone() };
    let mut text = serde_json::to_vec_pretty(&file).unwrap_or_default();
    text.push(b'\n');
    text
}

/// A size as people type it, in bytes: `512m`, `10G`, `1073741824`. Powers of 1024; none for nothing and for what is too
/// large to count.
pub(crate) fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        _ => return None,
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}

/// A size for people: `10 GiB`.
pub(crate) fn shown_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >= 1 << shift) {
        Some((shift, unit)) if bytes.is_multiple_of(1 << shift) => format!("{} {unit}", bytes >> shift),
        Some((shift, unit)) => {
            let tenths = bytes / ((1u64 << shift) / 10).max(1);
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_size_is_a_number_and_a_unit() {
        for (text, bytes) in [
            ("1", Some(1)),
            ("512b", Some(512)),
            ("4k", Some(4096)),
            ("64M", Some(64 << 20)),
            ("10g", Some(10 << 30)),
            ("1T", Some(1 << 40)),
            ("0", None),
            ("", None),
            ("g", None),
            ("1gb", None),
            ("1.5g", None),
            ("-1", None),
            ("+1", None),
            (" 1", None),
            ("99999999999t", None),
            ("1é", None),
        ] {
            assert_eq!(size(text), bytes, "{text:?}");
        }
        let shown: Vec<String> = [10 << 30, 1536, 100, 1].iter().map(|bytes| shown_size(*bytes)).collect();
        assert_eq!(shown, ["10 GiB", "1.5 KiB", "100 bytes", "1 bytes"]);
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_nothing() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        let path = host.storage_json();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert_eq!(read(&host).unwrap(), Backend::Directory);
        let pool = Pool { pool: "ployz".into(), dataset: "ployz/volumes".into() };
        std::fs::write(&path, text(&pool)).unwrap();
        assert_eq!(read(&host).unwrap(), Backend::Zfs(pool));
        for bad in [
            "",
            "{}",
            r#"{"schema":2,"backend":"zfs","pool":"a","dataset":"a/b"}"#,
            r#"{"schema":1,"backend":"btrfs","pool":"a","dataset":"a/b"}"#,
            r#"{"schema":1,"backend":"zfs","pool":"a","dataset":"b/c"}"#,
            r#"{"schema":1,"backend":"zfs","pool":"-a","dataset":"-a/b"}"#,
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(read(&host).is_err(), "{bad}");
        }
    }
}
