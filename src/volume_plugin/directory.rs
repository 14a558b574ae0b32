//! Volumes of a Machine without a pool: directories of its own filesystem, `NAME/_data` below the directory of volumes.
//! A directory without `_data` is the place where a dataset is mounted, and no volume.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use super::protocol::{Trouble, Volume, is_name};
use super::using;
use crate::durable::{make_dir, random_hex, sync_parent};
use crate::host::Host;

/// Where the data of a volume is.
const DATA: &str = "_data";
/// What is being made, and what is being removed: no volume can have such a name.
const NEW: &str = ".new.";
const OLD: &str = ".removed.";

/// The volume of this name, if there is one.
pub(super) fn find(host: &Host, name: &str) -> Result<Option<Volume>, Trouble> {
    let path = host.volumes().join(name);
    // What is mounted there is no directory of this filesystem, whatever is in it.
    if using::mount_at(host, &path)
        .map_err(|e| Trouble::Unknown(format!("reading the mounts: {e}")))?
        .is_some()
    {
        return Ok(None);
    }
    let data = path.join(DATA);
    let meta = fs::symlink_metadata(&path).and_then(|meta| match meta.is_dir() {
        true => fs::symlink_metadata(&data),
        false => Ok(meta),
    });
    match meta {
        Ok(meta) if meta.is_dir() => Ok(Some(Volume {
            name: name.to_owned(),
            mountpoint: Some(data),
            size: None,
            created: meta.ctime(),
            backend: "directory",
        })),
        Ok(_) => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Trouble::Unknown(format!("looking at {}: {e}", data.display()))),
    }
}

/// All of them.
pub(super) fn all(host: &Host) -> Result<Vec<Volume>, Trouble> {
    let unknown = |e: io::Error| Trouble::Unknown(format!("reading {}: {e}", host.volumes().display()));
    let entries = match fs::read_dir(host.volumes()) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unknown(e)),
    };
    let mut volumes = Vec::new();
    for entry in entries {
        let name = entry.map_err(unknown)?.file_name();
        if let Some(name) = name.to_str().filter(|name| is_name(name)) {
            volumes.extend(find(host, name)?);
        }
    }
    volumes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(volumes)
}

/// Makes one, whole or not at all.
pub(super) fn create(host: &Host, name: &str) -> Result<(), Trouble> {
    let (root, path) = (host.volumes(), host.volumes().join(name));
    let made = (|| {
        make_dir(&root, 0o711)?;
        let new = root.join(format!("{NEW}{}", random_hex(6)?));
        let made = (|| {
            fs::create_dir(&new)?;
            fs::set_permissions(&new, fs::Permissions::from_mode(0o711))?;
            fs::create_dir(new.join(DATA))?;
            fs::set_permissions(new.join(DATA), fs::Permissions::from_mode(0o755))?;
            sync_parent(&new.join(DATA))?;
            // An empty directory in its place is replaced; anything else is not.
            fs::rename(&new, &path)
        })();
        if made.is_err() {
            let _ = fs::remove_dir_all(&new);
        }
        made?;
        sync_parent(&path)
    })();
    made.map_err(|e: io::Error| Trouble::No(format!("making {}: {e}", path.display())))
}

/// Removes one and all that is in it; who still uses it is named, and keeps it.
pub(super) fn remove(host: &Host, name: &str) -> Result<(), Trouble> {
    let path = host.volumes().join(name);
    let holders = using::of_directory(host, &path.join(DATA));
    if !holders.is_empty() {
        return Err(Trouble::No(format!(
            "volume {name} is in use by {}: stop that first",
            holders.join(", ")
        )));
    }
    let removed = (|| {
        let old = host.volumes().join(format!("{OLD}{}", random_hex(6)?));
        fs::rename(&path, &old)?;
        sync_parent(&path)?;
        fs::remove_dir_all(&old)
    })();
    removed.map_err(|e: io::Error| Trouble::No(format!("removing {}: {e}", path.display())))
}

/// Removes what was being made or removed when an earlier plugin was cut off.
pub(super) fn sweep(host: &Host) {
    let left: Vec<PathBuf> = fs::read_dir(host.volumes())
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with(NEW) || name.starts_with(OLD)
        })
        .map(|entry| entry.path())
        .collect();
    for path in left {
        if let Err(e) = fs::remove_dir_all(&path) {
            tracing::warn!("{} is left: {e}", path.display());
        }
    }
}
