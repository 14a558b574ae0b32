//! `installed.json`: what an installer put in place, as far as it got. The file on disk decides; this only describes.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::admission::Admission;
use super::release::Version;
use crate::durable::{make_dir, move_aside, read_bounded, sha256_file, write_whole};
use crate::host::{Account, Host};

const SCHEMA: u32 = 1;
const MOST: usize = 256 * 1024;

/// One installed executable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// Its version.
    pub version: Version,
    /// Its digest.
    pub sha256: String,
    /// The digest of the archive that it came in, if it came in one.
    pub archive_sha256: Option<String>,
    /// When it was put in place.
    pub installed_at: Timestamp,
    /// By which attempt.
    pub attempt: String,
    /// Whether it was observed to run, ready, and to stay so.
    pub confirmed: bool,
    /// When that was.
    #[serde(default)]
    pub confirmed_at: Option<Timestamp>,
}

/// Whether Docker is a prerequisite of this Machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Docker {
    /// It is used.
    #[default]
    Auto,
    /// This Machine does without.
    None,
}

/// What is installed, as the last installer wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    schema: u32,
    /// The release that is in place.
    pub current: Option<Installed>,
    /// The last confirmed one before it.
    pub previous: Option<Installed>,
    /// The units that are ours.
    #[serde(default)]
    pub units: Vec<String>,
    /// Units whose file was, or was about to be, switched, and whose process was not seen under the new one yet.
    #[serde(default)]
    pub pending: Vec<String>,
    /// The operator's choice about Docker.
    #[serde(default)]
    pub docker: Docker,
}

impl Default for Inventory {
    fn default() -> Self {
        Self {
            schema: SCHEMA,
            current: None,
            previous: None,
            units: Vec::new(),
            pending: Vec::new(),
            docker: Docker::Auto,
        }
    }
}

impl Inventory {
    /// Reads what is described; a description that is missing or damaged describes nothing, and the second value says
    /// why.
    pub fn read(host: &Host) -> (Self, Option<String>) {
        let path = host.installed_json();
        let text = match read_bounded(&path, MOST) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return (Self::default(), None),
            Err(e) => return (Self::default(), Some(format!("reading {path:?}: {e}"))),
        };
        match serde_json::from_slice(&text) {
            Ok(inventory) => (inventory, None),
            Err(e) => (Self::default(), Some(format!("{path:?} is damaged: {e}"))),
        }
    }

    /// After damage: moves the file aside and takes the units that are on disk as ours, so that none is new to this
    /// Machine and what an operator disabled stays so. Returns what is worth telling.
    pub(crate) fn start_again(&mut self, host: &Host, damage: &str) -> String {
        let names = std::fs::read_dir(host.units()).into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        self.units = names.filter(|name| name.starts_with("ployz")).collect();
        match move_aside(&host.installed_json()) {
            Ok(aside) => format!("{damage}; it was moved aside to {}", aside.display()),
            Err(e) => format!("{damage}; it could not be moved aside: {e}"),
        }
    }

    /// Writes it whole.
    pub(crate) fn write(&self, host: &Host, _admission: &Admission) -> io::Result<()> {
        make_dir(&host.lib(), 0o755)?;
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        write_whole(host, &host.installed_json(), &text, 0o644, Account { uid: 0, gid: 0 })
    }

    /// What it says of the executable with this digest.
    pub fn describes(&self, sha256: &str) -> Option<&Installed> {
        [&self.current, &self.previous].into_iter().flatten().find(|installed| installed.sha256 == sha256)
    }
}

/// A file's device and inode: what it is, whatever it is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode(u64, u64);

impl Inode {
    /// Of the file that a path leads to.
    ///
    /// # Errors
    /// The system's.
    pub fn of(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|meta| Self(meta.dev(), meta.ino()))
    }
}

/// The executable in place: what it is and its digest. `None` when there is none.
///
/// # Errors
/// When it can't be read, or is no regular file.
pub fn on_disk(path: &Path) -> io::Result<Option<(Inode, String)>> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() => Ok(Some((Inode(meta.dev(), meta.ino()), sha256_file(path)?))),
        Ok(_) => Err(io::Error::other("not a regular file")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
