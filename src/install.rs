//! The installation module: the one place that puts a release on a Machine, and says what it observed.
//!
//! [`install`] is the whole flow, in the order in which it happens:
//!
//! 1. *resolve*: the request becomes one exact release, before anything is held;
//! 2. *admit*: the right to change the Machine, or who has it;
//! 3. *accept*: the attempt's record is durable;
//! 4. *prepare*: accounts and directories, only when asked;
//! 5. *acquire*: archive and checksums come to private staging;
//! 6. *verify*: the archive is the published one;
//! 7. *preflight*: the new binary runs here and is the release, its units are good;
//! 8. *activate*: renames, durable, in order;
//! 9. *restart*: what runs a replaced executable;
//! 10. *confirm*: it runs, is ready, and stays so.
//!
//! Each step makes the value that the next one takes, so that none can be left out.
//!
//! Recovery is the same flow for a release that is retained here ([`recover`]); nothing starts it but a person.
//!
//! An upgrade is the same flow with another entry: the daemon [`upgrade::resolve`]s and asks at the door, and the worker
//! behind it accepts and carries it out, in a unit of its own and from a copy of its own.

pub mod admission;
pub mod attempt;
pub mod doctor;
pub mod events;
pub mod installed;
pub mod plan;
pub mod preflight;
pub mod records;
pub mod recover;
pub mod release;
pub mod source;
pub mod status;
pub mod uninstall;
pub mod units;
pub mod upgrade;

mod acquisition;
mod activation;
mod archive;
pub(crate) mod confine;
mod door;
pub(crate) mod fetch;
mod flow;
mod host;
#[cfg(any(test, fuzzing))]
pub mod readers;
mod readiness;
mod restart;
pub(crate) mod staging;
mod steps;
mod stopped;
pub(crate) mod worker;

use std::path::PathBuf;

use crate::host::Host;
use crate::interrupt::Interrupt;
use admission::{Admission, AdmissionError, Holder};
use attempt::{Record, Requested};
use events::{Refusal, Tell};
use flow::Flow;
pub use host::storage::{PoolOf, Storage};
use installed::{Docker, Inventory};
use preflight::Problem;
use release::{Channel, Version};
use source::Settings;

/// How much of the host an installation may prepare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Accounts, groups and directories are made where they are missing.
    Prepare,
    /// Everything must be there.
    SoftwareOnly,
    /// Files only, for building images: systemd is never contacted.
    InstallationOnly,
    /// Everything must be there, and what the host is prepared with is no affair of this: an upgrade by the worker.
    Upgrade,
    /// Accounts and directories are made where they are missing, so that what is put back can run; Docker and the rest
    /// of the host are no affair of this.
    Recover,
}

/// Which release is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// This version.
    Exact(Version),
    /// What a channel points to.
    Channel(Channel),
    /// The executable that runs this.
    Itself,
}

/// A request to install, with explicit choices.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which release.
    pub wanted: Wanted,
    /// A channel that `wanted` was resolved from by someone else: recorded, never used to choose.
    pub label: Option<Channel>,
    /// An archive and its `checksums.txt` that are here already.
    pub local: Option<(PathBuf, PathBuf)>,
    /// How much of the host may be prepared.
    pub mode: Mode,
    /// Whether Docker is wanted; `None` keeps what was chosen before.
    pub docker: Option<Docker>,
    /// Whether storage for volumes is prepared; `None` leaves it as it is.
    pub storage: Option<Storage>,
    /// Users to add to group `ployz`.
    pub operators: Vec<String>,
    /// The version of the executable that runs this.
    pub own_version: Version,
}

/// One exact release, and where it comes from. Made by [`resolve`] alone.
#[derive(Debug)]
pub(crate) struct Release {
    version: Version,
    requested: Requested,
    source: Source,
}

/// Where the bytes of a release are.
#[derive(Debug)]
enum Source {
    /// At the published source; what it says of its files, where that was fetched before admission.
    Published { sums: Option<archive::Sums> },
    /// Here.
    Local { archive: PathBuf, checksums: PathBuf },
    /// They are running.
    Itself,
    /// They are retained beside the current release.
    Retained,
}

/// Installs a release. Returns the attempt's record, whose outcome says how it ended.
///
/// # Errors
/// A refusal: nothing was accepted, and nothing was changed.
pub fn install(
    host: &Host,
    request: &Request,
    interrupt: &Interrupt,
    tell: Tell<'_>,
) -> Result<Record, Refusal> {
    let settings = ready_to_ask(host, request)?;
    let release = resolve(host, &settings, request, interrupt)?;
    let admission = admit(host, "install")?;
    let flow = Flow::accept(host, &settings, request, &release, admission, interrupt, tell)?;
    flow.carry_out(&release)
}

/// What must be so before anything is asked of anyone.
fn ready_to_ask(host: &Host, request: &Request) -> Result<Settings, Refusal> {
    if request.mode != Mode::InstallationOnly && !host.systemd_runs() {
        let help = "to put files into an image that is not running, add --installation-only";
        return Err(Refusal::one("systemd is not PID 1 here", help));
    }
    can_run_children(host)?;
    let mut problems = host::unknown_users(host, &request.operators);
    match Settings::read(host) {
        Ok(settings) if problems.is_empty() => return Ok(settings),
        Ok(_) => {}
        Err(e) => problems
            .push(Problem::new(e.to_string(), "correct the file, or remove it to use the published source")),
    }
    Err(Refusal::Refused(problems))
}

/// Refuses a host on which this process can't find its own executable.
pub(crate) fn can_run_children(host: &Host) -> Result<(), Refusal> {
    if host.program().exists() {
        return Ok(());
    }
    Err(Refusal::one("/proc is not mounted here", "mount it: mount -t proc proc /proc"))
}

/// Makes one exact release of what is wanted, once; one that definitely does not exist is refused here.
fn resolve(
    host: &Host,
    settings: &Settings,
    request: &Request,
    interrupt: &Interrupt,
) -> Result<Release, Unresolved> {
    let (version, requested) =
        select(host, settings, request.wanted, request.label, request.own_version, interrupt)?;
    let source = match (&request.local, request.wanted) {
        (_, Wanted::Itself) => Source::Itself,
        (Some((archive, checksums)), _) => {
            Source::Local { archive: archive.clone(), checksums: checksums.clone() }
        }
        (None, _) => Source::Published { sums: Some(published(host, settings, version, interrupt)?) },
    };
    Ok(Release { version, requested, source })
}

/// The version that is wanted. A channel's pointer never leads below what is installed nor to another major line.
fn select(
    host: &Host,
    settings: &Settings,
    wanted: Wanted,
    label: Option<Channel>,
    own_version: Version,
    interrupt: &Interrupt,
) -> Result<(Version, Requested), Unresolved> {
    let (inventory, _) = Inventory::read(host);
    let installed = inventory.current.map(|current| current.version);
    let (version, requested) = match wanted {
        Wanted::Exact(version) => match label {
            None => (version, Requested::Exact(version)),
            // Someone else followed the pointer; its rules hold all the same.
            Some(channel) => {
                let major = installed.unwrap_or(version).major;
                release::may_select(channel, major, installed, version).map_err(|e| refused_pointer(&e))?;
                (version, Requested::Channel(channel))
            }
        },
        Wanted::Itself => (own_version, Requested::Itself),
        Wanted::Channel(channel) => {
            let major = installed.unwrap_or(own_version).major;
            let url = settings.pointer_url(major, channel);
            let pointer =
                fetch::fetch_small(host, settings, &url, 4096, interrupt).map_err(|e| unresolved(&e))?;
            let version = release::read_pointer(channel, major, installed, &pointer);
            let version = version.map_err(|e| refused_pointer(&e))?;
            (version, Requested::Channel(channel))
        }
    };
    if let Some(floor) = settings.floor.filter(|floor| version < *floor) {
        let what = format!("{version} is older than {floor}, the oldest that this Machine's settings accept");
        let help = format!("look at floor in {}", host.settings().display());
        return Err(Unresolved::Refused(Problem::new(what, help)));
    }
    Ok((version, requested))
}

/// What the source says of a release's files, and its signature where one counts.
fn published(
    host: &Host,
    settings: &Settings,
    version: Version,
    interrupt: &Interrupt,
) -> Result<archive::Sums, Unresolved> {
    let fetch = |url: &str, most| fetch::fetch_small(host, settings, url, most, interrupt);
    let checksums = fetch(&settings.checksums_url(version), archive::MOST_CHECKSUMS);
    let checksums = checksums.map_err(|e| unresolved(&e))?;
    let signature = match &settings.signing_key {
        None => None,
        Some(_) => match fetch(&settings.signature_url(version), archive::MOST_SIGNATURE) {
            Ok(signature) => Some(signature),
            // Verification refuses it as what it is.
            Err(fetch::FetchError::NotFound { .. }) => None,
            Err(e) => return Err(unresolved(&e)),
        },
    };
    Ok(archive::Sums { checksums, signature })
}

/// Why a request does not become one exact release. Nothing was accepted.
#[derive(Debug)]
pub enum Unresolved {
    /// The source says that there is no such release.
    NoSuchRelease(Problem),
    /// The source can't be asked now.
    Unreachable(Problem),
    /// It may not be this one, or not from this source.
    Refused(Problem),
}

fn refused_pointer(error: &release::PointerError) -> Unresolved {
    Unresolved::Refused(Problem::new(error.to_string(), "ask for an exact version: --version X.Y.Z"))
}

fn unresolved(error: &fetch::FetchError) -> Unresolved {
    let problem = |help: &str| Problem::new(error.to_string(), help);
    match error {
        fetch::FetchError::NotFound { .. } => {
            Unresolved::NoSuchRelease(problem("there is no such release: ask for another version or channel"))
        }
        fetch::FetchError::Unreachable { .. } => Unresolved::Unreachable(problem(
            "the source can't be reached now: try again later, or use --archive",
        )),
        _ => Unresolved::Refused(problem("look at the source and proxy in /etc/ployz/install.json")),
    }
}

/// Takes admission under a new attempt's id.
fn admit(host: &Host, kind: &str) -> Result<Admission, Refusal> {
    let id = crate::durable::random_hex(16).map_err(|e| Refusal::one(e.to_string(), "try again"))?;
    admit_as(host, kind, &id)
}

/// Takes admission under the id that an attempt shall have.
fn admit_as(host: &Host, kind: &str, id: &str) -> Result<Admission, Refusal> {
    let since = jiff::Timestamp::now();
    let holder = Holder { attempt: id.to_owned(), kind: kind.to_owned(), pid: std::process::id(), since };
    match Admission::try_take(host, holder) {
        Ok(admission) => Ok(admission),
        Err(AdmissionError::Busy(busy)) => Err(Refusal::Busy(busy)),
        Err(e) => Err(Refusal::one(
            e.to_string(),
            "look at the directory and its filesystem: ls -la /var/lib/ployz-install; df -h /var/lib/ployz-install",
        )),
    }
}
