//! Admission: the right to change the Machine now. One file, open-file-description locks, refused at once and never
//! queued; the kernel releases it when the holder dies, so there is no stale lock.
//!
//! Whoever installs holds it for writing, a mutation of the daemon for reading. Observers only ask the kernel. The lock of
//! a second byte says that the holder's description of itself is its own.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use nix::libc;
use serde::{Deserialize, Serialize};

use crate::durable::{make_dir, sync_parent};
use crate::host::Host;
use crate::lock::{self, Doing, Kind, lock, locked, unlock};

/// Who holds admission for writing, as it wrote of itself into the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its attempt.
    pub attempt: String,
    /// `install`, `upgrade`, `recover`…
    pub kind: String,
    /// Its process.
    pub pid: u32,
    /// Since when.
    pub since: Timestamp,
}

/// A process that has the lock file locked, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Its executable.
    pub executable: String,
    /// The unit in whose cgroup it is.
    pub unit: String,
}

/// What an observer sees of admission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Observed {
    /// Nobody holds it.
    Free,
    /// Someone installs; what it wrote of itself, where that can be read.
    Installing {
        /// The holder.
        holder: Option<Holder>,
    },
    /// Mutations are under way.
    Mutating {
        /// The Deploy among them, where that can be read.
        #[serde(flatten)]
        doing: Option<Doing>,
    },
    /// This process may not look.
    Unknown {
        /// Why.
        why: String,
    },
}

/// Someone else has admission.
#[derive(Debug, Clone)]
pub struct Busy {
    /// What they do.
    pub observed: Observed,
    /// Which processes hold it, where that can be seen.
    pub processes: Vec<Process>,
}

/// Why there is no admission.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// Someone else has it.
    #[error("busy: {}", .0.what())]
    Busy(Busy),
    /// The lock file can't be used.
    #[error("opening {path:?} for admission: {source}")]
    Open {
        /// The lock file.
        path: std::path::PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Busy {
    /// "install 1c2d… is running since 12:01:07 (pid 812)".
    pub fn what(&self) -> String {
        describe(&self.observed)
    }
}

/// Another has admission: who, as seen from here.
pub(crate) fn busy(host: &Host, observed: Observed) -> Busy {
    let meta = std::fs::symlink_metadata(host.admission());
    Busy { observed, processes: meta.map(|meta| processes(&meta)).unwrap_or_default() }
}

/// What an observation means, in words: "install 1c2d… is running since 12:01:07 (pid 812)".
pub fn describe(observed: &Observed) -> String {
    match observed {
        Observed::Installing { holder: Some(holder) } => format!(
            "{} {} is running since {} (pid {})",
            holder.kind,
            holder.attempt,
            holder.since.strftime("%H:%M:%S UTC"),
            holder.pid
        ),
        Observed::Installing { holder: None } => "an installation is running".into(),
        Observed::Mutating { doing: Some(doing) } => {
            format!("{} since {}", doing.what, doing.since.strftime("%H:%M:%S UTC"))
        }
        Observed::Mutating { doing: None } => "the Machine is being changed by its daemon".into(),
        Observed::Free => "another process had admission a moment ago".into(),
        Observed::Unknown { why } => format!("admission can't be seen: {why}"),
    }
}

/// Admission held for writing: an argument of every function that changes what is installed.
#[derive(Debug)]
pub struct Admission {
    file: File,
    holder: Holder,
}

/// Admission held for reading: an argument of every mutation of the daemon.
#[derive(Debug)]
pub struct MutationAdmission {
    _file: File,
}

impl Admission {
    /// Takes admission for writing, or says who has it. Makes the state directory and the lock file where they are
    /// missing, private to root until accounts exist.
    ///
    /// # Errors
    /// [`AdmissionError::Busy`] at once when another has it.
    pub fn try_take(host: &Host, holder: Holder) -> Result<Self, AdmissionError> {
        let path = host.admission();
        let open = |source| AdmissionError::Open { path: path.clone(), source };
        make_dir(&host.install_state(), 0o755).map_err(open)?;
        make_dir(&host.attempts(), 0o700).map_err(open)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        if !meta.is_file() || meta.nlink() != 1 {
            return Err(open(io::Error::other("not a regular file with one name")));
        }
        sync_parent(&path).map_err(open)?;
        if !lock(&file, ADMISSION, Kind::Exclusive).map_err(open)? {
            let busy = Busy { observed: observe_for(host, NAME_OF_A_HOLDER), processes: processes(&meta) };
            return Err(AdmissionError::Busy(busy));
        }
        let admission = Self { file, holder };
        admission.write().map_err(open)?;
        Ok(admission)
    }

    /// Lets group `ployz-admission` take read locks, once that group exists.
    pub(crate) fn share(&self, host: &Host) -> io::Result<()> {
        if let Some(group) = host.group("ployz-admission") {
            host.own(&self.file, 0, group)?;
            self.file.set_permissions(std::fs::Permissions::from_mode(0o640))?;
        }
        Ok(())
    }

    /// Whether the file that is locked is still the one that others look at: nobody of ours ever removes it.
    pub(crate) fn is_in_place(&self, host: &Host) -> bool {
        let own = self.file.metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        let found = std::fs::symlink_metadata(host.admission()).map(|meta| (meta.dev(), meta.ino())).ok();
        own.is_some() && own == found
    }

    /// What the attempt that holds it is: `install`, `upgrade`…
    pub fn kind(&self) -> &str {
        &self.holder.kind
    }

    /// The attempt that holds it.
    pub fn attempt(&self) -> &str {
        &self.holder.attempt
    }

    /// Who holds it is for people and observers only; the lock itself is the kernel's.
    fn write(&self) -> io::Result<()> {
        let mut file = &self.file;
        file.rewind()?;
        file.set_len(0)?;
        file.write_all(serde_json::to_string(&self.holder).map_err(io::Error::other)?.as_bytes())?;
        // Someone else's lock there keeps observers from the name, and nobody from installing.
        lock(file, DESCRIBED, Kind::Exclusive).map(drop)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        // The locks go with the file; an empty file reads better than the name of one that is gone.
        let _ = unlock(&self.file, DESCRIBED);
        let _ = self.file.set_len(0);
    }
}

impl MutationAdmission {
    /// Takes admission for reading, or says who installs.
    ///
    /// # Errors
    /// [`AdmissionError::Busy`] at once when an installation has it.
    pub fn try_take(host: &Host) -> Result<Self, AdmissionError> {
        let path = host.admission();
        let open = |source| AdmissionError::Open { path: path.clone(), source };
        let file = open_to_read(host).map_err(open)?;
        if lock(&file, ADMISSION, Kind::Shared).map_err(open)? {
            return Ok(Self { _file: file });
        }
        Err(AdmissionError::Busy(Busy { observed: observe(host), processes: Vec::new() }))
    }
}

fn open_to_read(host: &Host) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(host.admission())
}

/// The byte of the lock file whose lock is admission.
const ADMISSION: i64 = 0;
/// The byte whose lock says that what the file holds was written by whoever holds admission now, and not by one that was
/// killed before. Both end with their holder.
const DESCRIBED: i64 = 1;
/// Between two looks at a file that its holder is about to write.
const AGAIN: Duration = Duration::from_millis(5);
/// For how long an observer waits for a holder's name, and one who is refused.
const NAME_AT_A_GLANCE: Duration = Duration::from_millis(50);
const NAME_OF_A_HOLDER: Duration = Duration::from_secs(2);

/// Looks at admission without taking anything.
pub fn observe(host: &Host) -> Observed {
    observe_for(host, NAME_AT_A_GLANCE)
}

/// Looks, and while the holder has not described itself yet looks again for a moment.
fn observe_for(host: &Host, patience: Duration) -> Observed {
    let file = match open_to_read(host) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Observed::Free,
        Err(e) => return Observed::Unknown { why: e.to_string() },
    };
    let started = Instant::now();
    loop {
        match locked(&file, ADMISSION) {
            Ok(None) => return Observed::Free,
            Ok(Some(Kind::Shared)) => return Observed::Mutating { doing: lock::doing(&host.deploy_lock()) },
            Ok(Some(Kind::Exclusive)) => {}
            Err(e) => return Observed::Unknown { why: e.to_string() },
        }
        let holder = described(&file);
        if holder.is_some() || started.elapsed() >= patience {
            return Observed::Installing { holder };
        }
        std::thread::sleep(AGAIN);
    }
}

/// What the present holder wrote of itself. A holder writes before it locks the second byte: text that is the same before
/// and after that lock was seen is that holder's.
fn described(file: &File) -> Option<Holder> {
    let before = text(file)?;
    let own = matches!(locked(file, DESCRIBED), Ok(Some(Kind::Exclusive)));
    if !own || text(file)? != before {
        return None;
    }
    serde_json::from_str(&before).ok()
}

fn text(mut file: &File) -> Option<String> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(4096).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Which processes have a lock on the file: found through `/proc/*/fdinfo`, since OFD locks carry no pid.
/// Locks of every kind count: each of them stands in the way.
fn processes(lock_file: &std::fs::Metadata) -> Vec<Process> {
    let inode = format!(":{} ", lock_file.ino());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let holds =
            std::fs::read_dir(entry.path().join("fdinfo")).into_iter().flatten().flatten().any(|fd| {
                let text = std::fs::read_to_string(fd.path()).unwrap_or_default();
                text.lines().any(|line| line.starts_with("lock:") && line.contains(&inode))
            });
        if holds {
            found.push(process(pid));
        }
    }
    found
}

fn process(pid: u32) -> Process {
    let dir = std::path::PathBuf::from(format!("/proc/{pid}"));
    let cgroup = std::fs::read_to_string(dir.join("cgroup")).unwrap_or_default();
    Process {
        pid,
        uid: std::fs::metadata(&dir).map(|m| m.uid()).unwrap_or_default(),
        executable: std::fs::read_link(dir.join("exe")).map(|p| p.display().to_string()).unwrap_or_default(),
        unit: cgroup
            .lines()
            .find_map(|l| l.strip_prefix("0::"))
            .and_then(|p| p.rsplit('/').next())
            .unwrap_or("")
            .into(),
    }
}
