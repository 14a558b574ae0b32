//! Package managers: locks are waited for and their holder named, every call is bounded, and what it last said is in the
//! error. A call that has begun is not cut off: half a package is worse than a late Ctrl-C.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::distribution::Manager;
use crate::command::{CommandError, Run};
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::text::printable;

/// The longest wait for another package manager.
const LOCK: Duration = Duration::from_secs(300);
/// Between two looks at its lock, and between two lines about what is going on.
const LOOK: Duration = Duration::from_millis(500);
const TELL: Duration = Duration::from_secs(5);
/// How much of what a package manager said is kept for an error.
const TAIL: usize = 2000;

/// How packages are installed here, and how long that may take altogether.
pub(super) struct Packages<'a> {
    pub(super) host: &'a Host,
    pub(super) manager: Manager,
    pub(super) deadline: Duration,
    pub(super) interrupt: &'a Interrupt,
    pub(super) tell: &'a mut dyn FnMut(&str),
}

impl Packages<'_> {
    /// Reads what the configured sources have.
    pub(super) fn refresh(&mut self) -> Result<(), String> {
        match self.manager {
            Manager::Apt => self.call(&["-q", "update"]),
            // They refresh by themselves when they have to.
            Manager::Dnf | Manager::Yum | Manager::Zypper | Manager::Pacman => Ok(()),
        }
    }

    /// Installs packages and nothing that they merely recommend.
    pub(super) fn install(&mut self, packages: &[&str]) -> Result<(), String> {
        let words: &[&str] = match self.manager {
            Manager::Apt => {
                &["-q", "-y", "-o", "Dpkg::Options::=--force-confold", "--no-install-recommends", "install"]
            }
            Manager::Dnf => &["-y", "--setopt=install_weak_deps=False", "install"],
            Manager::Yum => &["-y", "install"],
            // Without -y: the databases of a system that is not upgraded as a whole are left alone.
            Manager::Pacman => &["--noconfirm", "--needed", "-S"],
            Manager::Zypper => &["--non-interactive", "install", "--no-recommends"],
        };
        self.call(&[words, packages].concat())
    }

    /// Whether the configured sources have a package.
    pub(super) fn has(&self, package: &str) -> bool {
        match self.manager {
            Manager::Apt => {
                let run = Run::new(self.host.tool("apt-cache"), Duration::from_secs(60));
                run.args(["policy", package]).run().is_ok_and(|ended| {
                    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
                    text.lines().any(|line| {
                        line.trim().strip_prefix("Candidate:").is_some_and(|c| c.trim() != "(none)")
                    })
                })
            }
            Manager::Dnf | Manager::Yum => {
                let run = Run::new(self.host.tool(self.manager.program()), Duration::from_secs(120));
                run.args(["-q", "info", package]).run().is_ok_and(|ended| ended.status.success())
            }
            Manager::Pacman | Manager::Zypper => false,
        }
    }

    fn call(&mut self, arguments: &[&str]) -> Result<(), String> {
        let started = Instant::now();
        self.wait_for_lock()?;
        let program = self.manager.program();
        let named = format!("{program} {}", arguments.join(" "));
        let wait = LOCK.min(self.deadline).as_secs().to_string();
        let mut run = Run::new(self.host.tool(program), self.deadline);
        run = match self.manager {
            Manager::Apt => run
                .env("DEBIAN_FRONTEND", "noninteractive")
                // Its hook would restart services that nobody asked to restart.
                .env("NEEDRESTART_SUSPEND", "1")
                .args(["-o", &format!("DPkg::Lock::Timeout={wait}")]),
            Manager::Zypper => run.env("ZYPP_LOCK_TIMEOUT", &wait),
            Manager::Dnf | Manager::Yum | Manager::Pacman => run,
        };
        let mut tail = Vec::new();
        let mut told = Instant::now();
        let tell = &mut self.tell;
        tell(&named);
        let ended = run.args(arguments).stream(None, &mut |bytes| {
            tail.extend_from_slice(bytes);
            let excess = tail.len().saturating_sub(TAIL);
            tail.drain(..excess);
            if told.elapsed() >= TELL {
                told = Instant::now();
                let text = String::from_utf8_lossy(&tail).into_owned();
                let last = text.lines().rev().find(|line| !line.trim().is_empty()).map(printable);
                tell(&format!("{program}: {}", last.unwrap_or_default()));
            }
            Ok(())
        });
        let said = || {
            let text = String::from_utf8_lossy(&tail).into_owned();
            let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
            let last = lines[lines.len().saturating_sub(4)..].iter().map(|line| printable(line));
            last.collect::<Vec<_>>().join(" / ")
        };
        match ended {
            Ok(ended) if ended.status.success() => {
                (self.tell)(&format!("{program}: done in {} s", started.elapsed().as_secs()));
                Ok(())
            }
            Ok(ended) => {
                let how = crate::command::how(&ended.status);
                let stderr = printable(&ended.stderr);
                let words = if stderr.is_empty() { said() } else { stderr };
                Err(format!("{named} {how}; it said: {words}"))
            }
            Err(e @ CommandError::Deadline { .. }) => {
                Err(format!("{named}: {e}; its last output: {}", said()))
            }
            Err(e) => Err(format!("{named}: {e}")),
        }
    }

    /// Waits until no other package manager is at work; then says who still is.
    fn wait_for_lock(&mut self) -> Result<(), String> {
        let started = Instant::now();
        let longest = LOCK.min(self.deadline);
        let mut told: Option<Instant> = None;
        loop {
            let Some(holder) = self.locks().iter().find_map(|path| holder(path)) else { return Ok(()) };
            if let Some(signal) = self.interrupt.requested() {
                return Err(format!("cancelled by {signal} while waiting for {holder}"));
            }
            if started.elapsed() >= longest {
                return Err(format!(
                    "{holder} has been at work with the packages for {} s: nothing was ended, nothing was installed",
                    longest.as_secs()
                ));
            }
            if told.is_none_or(|told| told.elapsed() >= 6 * TELL) {
                told = Some(Instant::now());
                (self.tell)(&format!("waiting for {holder}"));
            }
            std::thread::sleep(LOOK.min(longest));
        }
    }

    fn locks(&self) -> Vec<PathBuf> {
        let names: &[&str] = match self.manager {
            Manager::Apt => &[
                "var/lib/dpkg/lock-frontend",
                "var/lib/dpkg/lock",
                "var/lib/apt/lists/lock",
                "var/cache/apt/archives/lock",
            ],
            Manager::Pacman => &["var/lib/pacman/db.lck"],
            // They wait for each other by themselves.
            Manager::Dnf | Manager::Yum | Manager::Zypper => &[],
        };
        names.iter().map(|name| self.host.root().join(name)).collect()
    }
}

/// Who has a lock file: by its lock, or for pacman by its being there.
fn holder(path: &Path) -> Option<String> {
    if path.extension().is_some_and(|extension| extension == "lck") {
        return path.exists().then(|| format!("a package manager ({})", path.display()));
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = std::fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
    #[allow(clippy::cast_possible_truncation, reason = "the constants are small; only their C types differ")]
    let mut asked = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_GETLK(&mut asked)).ok()?;
    if libc::c_int::from(asked.l_type) == libc::F_UNLCK {
        return None;
    }
    let command = std::fs::read(format!("/proc/{}/cmdline", asked.l_pid)).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    let command: String = printable(&command).chars().take(120).collect();
    Some(format!("process {} ({}, {})", asked.l_pid, command.trim(), path.display()))
}

/// What is wrong with the state of the packages, if that can be told without changing it.
pub(super) fn half_configured(host: &Host, manager: Manager) -> Option<String> {
    if manager != Manager::Apt {
        return None;
    }
    let audit = Run::new(host.tool("dpkg"), Duration::from_secs(60)).args(["--audit"]).run().ok()?;
    let text = printable(&String::from_utf8_lossy(&audit.stdout));
    (!text.is_empty()).then(|| text.chars().take(200).collect())
}
