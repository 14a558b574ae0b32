//! Private staging: the archive of an attempt, and the copy that an installer runs from, so that its own executable
//! survives what it replaces.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::admission::Admission;
use crate::command::Run;
use crate::durable::{self, copy_exactly, make_dir, random_hex};
use crate::host::Host;

/// What an installer's scope is called.
pub(crate) const SCOPE_PREFIX: &str = "ployz-install-";
/// How systemd-run is asked for one.
const SCOPE: [&str; 4] = ["--scope", "--collect", "--quiet", "--description=ployzd install"];
/// More than the deadlines of all stages together.
const SCOPE_SECONDS: u32 = 3600;

/// The staging directory of one attempt; gone when this value is.
#[derive(Debug)]
pub(crate) struct Staging {
    dir: PathBuf,
    next: PathBuf,
}

impl Staging {
    /// Makes it, after sweeping what earlier attempts left.
    pub(crate) fn make(host: &Host, admission: &Admission) -> io::Result<Self> {
        sweep(host, admission);
        for dir in [host.bin(), host.lib(), host.staging()] {
            make_dir(&dir, 0o755)?;
        }
        let dir = host.staging().join(admission.attempt());
        // Others may pass, nobody may look: systemd-analyze and the staged binary run as who they are.
        make_dir(&dir, 0o711)?;
        Ok(Self { dir, next: host.next(admission.attempt()) })
    }

    /// A file or directory in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where the next executable is extracted to: beside the current one.
    pub(crate) fn next(&self) -> &Path {
        &self.next
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What a crash leaves here instead is swept by the next attempt.
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_file(&self.next);
    }
}

/// Removes what other attempts left: under admission nobody else has an attempt. A copy that a living process runs
/// from stays; what bootstraps staged is theirs.
fn sweep(host: &Host, admission: &Admission) {
    let own = admission.attempt();
    for entry in std::fs::read_dir(host.staging()).into_iter().flatten().flatten() {
        if entry.file_name() != own {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    for entry in std::fs::read_dir(host.own_copies()).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.split('.').next());
        if !pid.is_some_and(|pid| Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    durable::sweep(&host.lib(), |name| name == "installed.json");
    durable::sweep(&host.units(), |name| name.starts_with("ployz"));
    durable::sweep(&host.attempts(), |name| name.ends_with(".json"));
    durable::sweep(&host.sysusers().with_file_name(""), |name| name == "ployz.conf");
    for entry in std::fs::read_dir(host.bin()).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let left = name.to_str().and_then(|n| n.strip_prefix(".ployzd."));
        if left.is_some_and(|attempt| attempt != own) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// What this process runs from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunsFrom {
    /// `/usr/local/bin`: what it is about to replace, or to keep.
    Installation,
    /// A copy of its own, in this directory, or unlinked already.
    OwnCopy(PathBuf),
    /// Anywhere else: a bootstrap's staging, a download.
    Elsewhere,
}

/// Where this process's executable is.
pub(crate) fn runs_from(host: &Host) -> io::Result<RunsFrom> {
    let path = std::fs::read_link("/proc/self/exe")?;
    if let Some(dir) = path.parent().filter(|dir| dir.parent() == Some(&host.own_copies())) {
        return Ok(RunsFrom::OwnCopy(dir.to_owned()));
    }
    // Not by name alone: a hard link or a bind mount is the same file under another name.
    let own = super::installed::Inode::of(Path::new("/proc/self/exe"))?;
    let same = |path: &Path| super::installed::Inode::of(path).is_ok_and(|inode| inode == own);
    let installed = path.parent() == Some(&host.bin()) || same(&host.installed()) || same(&host.previous());
    Ok(if installed { RunsFrom::Installation } else { RunsFrom::Elsewhere })
}

/// Copies this process's executable into private staging and checks that the copy is byte for byte what is running.
pub(crate) fn copy_of_own(host: &Host) -> io::Result<PathBuf> {
    make_dir(&host.lib(), 0o755)?;
    make_dir(&host.own_copies(), 0o755)?;
    let dir = host.own_copies().join(format!("{}.{}", std::process::id(), random_hex(4)?));
    make_dir(&dir, 0o700)?;
    let path = dir.join("ployzd");
    copy_exactly("/proc/self/exe".as_ref(), &path)?;
    // Not durable: after a power loss nobody runs from it.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Becomes `program` with the arguments of this process: same process, `environment` added. With `scope`, in a
/// transient scope of its own, so that the end of the login session does not end it; bounded in time. Returns only
/// when that did not work.
pub(crate) fn become_program(program: &Path, scope: Option<&str>, environment: &[(&str, &str)]) -> io::Error {
    let mut command = match scope {
        None => Command::new(program),
        Some(name) => {
            let mut command = Command::new("systemd-run");
            command
                .args(SCOPE)
                .arg(format!("--unit={name}"))
                .arg(format!("--property=RuntimeMaxSec={SCOPE_SECONDS}"));
            command.arg("--property=TimeoutStopSec=20s");
            command.arg("--").arg(program);
            command
        }
    };
    let environment = environment.iter().copied();
    command.args(std::env::args_os().skip(1)).env("PATH", crate::command::PATH).envs(environment).exec()
}

/// A scope for one installer, tried out: its name, or why there can be none. (An exec of something that then fails
/// could not be told from a failed installation.)
pub(crate) fn try_scope() -> Result<String, String> {
    let name = format!("{SCOPE_PREFIX}{}", random_hex(4).map_err(|e| e.to_string())?);
    let probe = Run::new("systemd-run", Duration::from_secs(10)).args(SCOPE);
    let probe = probe.args([format!("--unit={name}-probe")]).args(["--", "true"]);
    probe.check().map(|_| name).map_err(|e| e.to_string())
}

/// Whether this process is in such a scope, or in a unit of ours that bounds it already.
pub(crate) fn in_own_unit() -> bool {
    super::attempt::own_unit().is_some()
}

/// The first act of a process that runs from its own copy: nothing is left behind, however it ends.
pub(crate) fn unlink_own_copy(dir: &Path) {
    let _ = std::fs::remove_dir_all(dir);
}
