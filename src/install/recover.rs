//! Recovery: a person puts a retained release back. Nothing else starts it, ever.
//!
//! 1. what is put back, and what is there now, for the person who is asked;
//! 2. *stop*: the daemon, the workers of its Deploys and the sockets that would start them again, so that nothing which
//!    the daemon began can veto its own repair;
//! 3. *admit*, *accept* and the stages of [`super::flow`], with the retained executable as the release;
//! 4. on every way out, what was open before is open again.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::admission::{self, Admission, Observed, Process};
use super::attempt::{Record, Requested};
use super::events::{Refusal, Tell};
use super::flow::Flow;
use super::installed::{Installed, Inventory, on_disk};
use super::preflight;
use super::release::Version;
use super::source::Settings;
use super::stopped::Stopped;
use super::units::{DEPLOY_DOOR, SERVICE, SOCKET};
use super::{Mode, Release, Request, Source, Wanted};
use crate::durable::{sha256_file, writable_by_others};
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::systemd::Systemd;

/// For holders of admission that were just stopped to be gone.
const RELEASE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(50);

/// What is put back, and what is there now.
#[derive(Debug, Clone)]
pub struct Recovery {
    /// The release that is put back.
    pub version: Version,
    /// Its digest.
    pub sha256: String,
    /// What the installer wrote of it; none where its description is lost.
    pub described: Option<Installed>,
    /// The digest of the executable in place.
    pub in_place: Option<String>,
    /// What the installer wrote of that.
    pub current: Option<Installed>,
    /// It is this executable, and not the retained one beside it.
    itself: bool,
}

/// Says what would be put back: this executable; run as the installed one, the retained executable.
///
/// # Errors
/// A refusal: there is nothing to put back, or it does not run. Nothing was changed.
pub fn look(host: &Host, own_version: Version, interrupt: &Interrupt) -> Result<Recovery, Refusal> {
    if !host.systemd_runs() {
        return Err(Refusal::one("systemd is not PID 1 here", "there is no daemon to recover"));
    }
    super::can_run_children(host)?;
    let (inventory, _) = Inventory::read(host);
    let digest = |path: PathBuf| {
        let unreadable = |e: std::io::Error| {
            let help = format!("look at it: ls -la {}", path.display());
            Refusal::one(format!("reading {path:?}: {e}"), help)
        };
        on_disk(&path).map(|found| found.map(|(_, sha256)| sha256)).map_err(unreadable)
    };
    let own = sha256_file(host.program())
        .map_err(|e| Refusal::one(format!("reading this executable: {e}"), "try again"))?;
    // What stands in the way of a file there is said by preflight.
    let in_place = digest(host.installed()).unwrap_or_default();
    let current = in_place.as_ref().and_then(|sha256| inventory.describes(sha256)).cloned();
    let recovery = |version, sha256: String, itself| {
        let described = inventory.describes(&sha256).cloned();
        Recovery { version, sha256, described, in_place: in_place.clone(), current: current.clone(), itself }
    };
    if in_place.as_deref() != Some(own.as_str()) {
        return Ok(recovery(own_version, own, true));
    }
    match digest(host.previous())? {
        None => Err(Refusal::one(
            format!("there is no {}: no release is retained", host.previous().display()),
            "install a release: sudo /usr/local/bin/ployzd install --version X.Y.Z",
        )),
        // It is retained and in place: what there is to do is to make it run.
        Some(sha256) if sha256 == own => Ok(recovery(own_version, own, true)),
        Some(sha256) => {
            if let Some(who) = writable_by_others(&host.previous()).filter(|_| host.privileged()) {
                let help = "look at what it is, then install a release: \
                            sudo /usr/local/bin/ployzd install --version X.Y.Z";
                return Err(Refusal::one(who, help));
            }
            let (settings, _) = settings(host)?;
            let about =
                preflight::ask_version(host, &host.previous(), settings.deadlines.preflight, interrupt);
            let version = about.map_err(|refused| refused.error).and_then(|about| {
                about.version.parse().map_err(|_| format!("it says that it is {:?}", about.version))
            });
            let version = version.map_err(|why| {
                let what = format!("the retained {}: {why}", host.previous().display());
                Refusal::one(what, "install a release: sudo /usr/local/bin/ployzd install --version X.Y.Z")
            })?;
            Ok(recovery(version, sha256, false))
        }
    }
}

/// Puts it back. Returns the attempt's record, whose outcome says how it ended.
///
/// # Errors
/// A refusal: nothing was accepted, and what was stopped runs again.
pub fn recover(
    host: &Host,
    recovery: &Recovery,
    own_version: Version,
    interrupt: &Interrupt,
    tell: Tell<'_>,
) -> Result<Record, Refusal> {
    let (settings, ignored) = settings(host)?;
    // An installation that runs is not ours to disturb.
    let observed = admission::observe(host);
    if matches!(observed, Observed::Installing { .. }) {
        return Err(Refusal::Busy(admission::busy(host, observed)));
    }
    let release = Release {
        version: recovery.version,
        requested: Requested::Itself,
        source: if recovery.itself { Source::Itself } else { Source::Retained },
    };
    let request = Request {
        wanted: Wanted::Itself,
        label: None,
        local: None,
        mode: Mode::Recover,
        docker: None,
        storage: None,
        operators: Vec::new(),
        own_version,
    };
    let systemd = Systemd::new(settings.deadlines.systemctl);
    let stopped = Stopped::stop(systemd, &[SOCKET, SERVICE, DEPLOY_DOOR]);
    let admission = admit(host, "recover", stopped.failed())?;
    let mut flow = Flow::accept(host, &settings, &request, &release, admission, interrupt, tell)?;
    if let Some(ignored) = ignored {
        flow.warn(ignored);
    }
    if let Some(failed) = stopped.failed() {
        flow.warn(failed.to_owned());
    }
    flow.carry_out(&release)
}

/// Root's settings; where they can't be read, the defaults and what is wrong: a repair needs nothing of them.
fn settings(host: &Host) -> Result<(Settings, Option<String>), Refusal> {
    Settings::read(host).map(|settings| (settings, None)).or_else(|e| {
        let defaults = Settings::defaults().map_err(|e| Refusal::one(e, "this is a fault of this release"));
        Ok((defaults?, Some(format!("{e}: its settings were not used"))))
    })
}

/// Takes admission after the daemon was stopped. What was just stopped may take a moment to be gone; nobody else is waited for.
pub(super) fn admit(host: &Host, kind: &str, not_stopped: Option<&str>) -> Result<Admission, Refusal> {
    let started = Instant::now();
    loop {
        match super::admit(host, kind) {
            Err(Refusal::Busy(busy))
                if started.elapsed() < RELEASE && busy.processes.iter().all(of_the_daemon) =>
            {
                std::thread::sleep(AGAIN);
            }
            Err(Refusal::Busy(busy)) => {
                if let Some(why) = not_stopped {
                    tracing::warn!("{why}");
                }
                return Err(Refusal::Busy(busy));
            }
            other => return other,
        }
    }
}

fn of_the_daemon(process: &Process) -> bool {
    process.unit == SERVICE || process.unit.starts_with("ployz-deploy@")
}
