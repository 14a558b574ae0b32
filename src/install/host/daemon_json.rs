//! Docker's `daemon.json`: what is wanted of it is merged in, everything else stays as it is.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::durable::{read_bounded, write_whole};
use crate::host::{Account, Host};

const MOST: usize = 256 * 1024;

/// What is to be done with the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Merge {
    /// Everything that is wanted is in it.
    Nothing,
    /// This content; what is worth knowing of it.
    Write(Vec<u8>, Vec<String>),
}

/// Looks at the file and at what is wanted in it. What is set there otherwise stays so, but for what must be.
///
/// # Errors
/// What is wrong with it: nothing is changed then.
pub(super) fn look(path: &Path) -> Result<Merge, String> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => {
            return Err(format!("{} is a link to elsewhere", path.display()));
        }
        Ok(meta) if !meta.is_file() => return Err(format!("{} is not a regular file", path.display())),
        _ => {}
    }
    let text = match read_bounded(path, MOST) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(e) => return Err(format!("reading {}: {e}", path.display())),
    };
    merge(&text).map_err(|e| format!("{} {e}", path.display()))
}

fn merge(text: &[u8]) -> Result<Merge, String> {
    if text.starts_with(b"\xef\xbb\xbf") {
        return Err("begins with a byte order mark, which Docker does not take".into());
    }
    let mut found: Map<String, Value> = if text.trim_ascii().is_empty() {
        Map::new()
    } else {
        serde_json::from_slice(text).map_err(|e| format!("is not a JSON object: {e}"))?
    };
    if found.contains_key("storage-driver") {
        return Err("sets storage-driver, which goes against containerd's image store".into());
    }
    let before = found.clone();
    let mut notes = Vec::new();
    let features = found.entry("features").or_insert_with(|| json!({}));
    let Some(features) = features.as_object_mut() else {
        return Err("has features that are not an object".into());
    };
    match features.get("containerd-snapshotter") {
        None => drop(features.insert("containerd-snapshotter".into(), true.into())),
        Some(Value::Bool(true)) => {}
        Some(other) => return Err(format!("sets features.containerd-snapshotter to {other}")),
    }
    match found.get("live-restore") {
        None => drop(found.insert("live-restore".into(), true.into())),
        Some(Value::Bool(true)) => {}
        Some(_) => notes
            .push("daemon.json says live-restore is off: containers end when Docker is restarted".to_owned()),
    }
    if !found.contains_key("log-driver") && !found.contains_key("log-opts") {
        found.insert("log-driver".into(), "json-file".into());
        found.insert("log-opts".into(), json!({"max-size": "10m", "max-file": "3"}));
    }
    if found == before {
        return Ok(Merge::Nothing);
    }
    let mut text = serde_json::to_vec_pretty(&found).map_err(|e| e.to_string())?;
    text.push(b'\n');
    Ok(Merge::Write(text, notes))
}

/// A file as it was, to be put back when what it was changed for does not come to its end.
#[derive(Debug)]
pub(super) struct Before {
    path: PathBuf,
    text: Option<Vec<u8>>,
    mode: u32,
}

/// Writes the content; the mode stays, and what was there stays beside it as `daemon.json.before-ployz`.
pub(super) fn write(host: &Host, path: &Path, text: &[u8]) -> io::Result<Before> {
    let owner = Account { uid: 0, gid: 0 };
    let before = match read_bounded(path, MOST) {
        Ok(text) => {
            let mode = std::fs::metadata(path)?.permissions().mode() & 0o7777;
            write_whole(host, &path.with_extension("json.before-ployz"), &text, mode, owner)?;
            Before { path: path.to_owned(), text: Some(text), mode }
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Before { path: path.to_owned(), text: None, mode: 0o644 }
        }
        Err(e) => return Err(e),
    };
    write_whole(host, path, text, before.mode, owner)?;
    Ok(before)
}

impl Before {
    /// Puts it back.
    pub(super) fn restore(&self, host: &Host) -> io::Result<()> {
        match &self.text {
            Some(text) => write_whole(host, &self.path, text, self.mode, Account { uid: 0, gid: 0 }),
            None => std::fs::remove_file(&self.path),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn merged(text: &str) -> Value {
        match merge(text.as_bytes()).unwrap() {
            Merge::Write(text, _) => serde_json::from_slice(&text).unwrap(),
            Merge::Nothing => panic!("nothing to write: {text}"),
        }
    }

    #[test]
    fn what_is_there_stays_and_what_is_wanted_comes_in() {
        let wanted = json!({
            "features": {"containerd-snapshotter": true}, "live-restore": true, "log-driver": "json-file",
            "log-opts": {"max-size": "10m", "max-file": "3"},
        });
        assert_eq!(merged(""), wanted);
        assert_eq!(merged(" \n"), wanted);
        assert_eq!(merge(wanted.to_string().as_bytes()).unwrap(), Merge::Nothing);
        let mirrors = merged(
            r#"{"registry-mirrors":["https://m.test"],"data-root":"/srv/d","features":{"x":true},"log-driver":"journald"}"#,
        );
        assert_eq!(mirrors["registry-mirrors"], json!(["https://m.test"]));
        assert_eq!(mirrors["data-root"], "/srv/d");
        assert_eq!(mirrors["features"], json!({"x": true, "containerd-snapshotter": true}));
        assert_eq!((&mirrors["log-driver"], mirrors.get("log-opts")), (&json!("journald"), None));
        assert_eq!(merged(r#"{"live-restore":false}"#)["live-restore"], false, "an operator's choice");
        for (broken, why) in [
            ("{", "not a JSON object"),
            ("[]", "not a JSON object"),
            ("\u{feff}{}", "byte order mark"),
            (r#"{"features":[]}"#, "not an object"),
            (r#"{"features":{"containerd-snapshotter":false}}"#, "to false"),
            (r#"{"storage-driver":"zfs"}"#, "storage-driver"),
        ] {
            let error = merge(broken.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{broken}: {error}");
        }
    }

    #[test]
    fn a_file_keeps_its_mode_and_can_be_put_back() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        let path = root.path().join("daemon.json");
        std::fs::write(&path, "{\"debug\": true}").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let Merge::Write(text, _) = look(&path).unwrap() else { panic!("nothing to write") };
        let before = write(&host, &path, &text).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(look(&path).unwrap(), Merge::Nothing);
        let kept = std::fs::read_to_string(root.path().join("daemon.json.before-ployz")).unwrap();
        assert_eq!(kept, "{\"debug\": true}");
        before.restore(&host).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"debug\": true}");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/nonexistent", &path).unwrap();
        assert!(look(&path).unwrap_err().contains("a link"));
    }
}
