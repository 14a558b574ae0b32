//! The state of a Machine as it can be seen from here: disk, process and API, each read by itself, and where they
//! differ.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::admission::{self, Observed};
use super::attempt::State;
use super::installed::{Inode, Installed, Inventory, on_disk};
use super::records::{self, Seen, View};
use super::units::{DOOR, SERVICE, SOCKET};
use crate::durable::writable_by_others;
use crate::host::Host;
use crate::systemd::Systemd;
use crate::text::printable_value;

const DEADLINE: Duration = Duration::from_secs(5);

/// What is in the place of the current release.
#[derive(Debug, Clone, Serialize)]
pub struct OnDisk {
    /// Its digest.
    pub sha256: String,
    /// What the installer wrote of exactly this file; none after a change by hand or a crash.
    pub described: Option<Installed>,
}

/// What systemd and `/proc` say of the daemon.
#[derive(Debug, Clone, Serialize)]
pub struct Process {
    /// `active`, `failed`, `inactive`…
    pub state: String,
    /// The main process.
    pub pid: Option<u32>,
    /// When it started, as systemd prints it.
    pub since: String,
    /// Whether it runs the installed file; unknown to those who may not look.
    pub runs_installed: Option<bool>,
    /// Automatic restarts.
    pub restarts: u32,
    /// Units of ours that would not start at boot.
    pub not_enabled: Vec<String>,
    /// Sockets of ours that are not open.
    pub closed: Vec<String>,
    /// How the last one ended, when none runs.
    pub result: String,
}

/// What was seen as itself; what was not as `{"unknown": "why"}`.
fn seen<T: Serialize, S: serde::Serializer>(
    seen: &Result<T, String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match seen {
        Ok(value) => value.serialize(serializer),
        Err(why) => serde_json::json!({"unknown": why}).serialize(serializer),
    }
}

/// A Machine as it was seen at one moment. What could not be seen is an error text, never a guess.
#[derive(Debug, Serialize)]
pub struct Status {
    /// Of the format.
    pub schema: u32,
    /// The host's name.
    pub host: String,
    /// The file in place.
    #[serde(serialize_with = "seen")]
    pub installed: Result<Option<OnDisk>, String>,
    /// The daemon's process.
    #[serde(serialize_with = "seen")]
    pub process: Result<Process, String>,
    /// What the Machine API answered.
    #[serde(serialize_with = "seen")]
    pub api: Result<Value, String>,
    /// The retained binary.
    #[serde(serialize_with = "seen")]
    pub previous: Result<Option<OnDisk>, String>,
    /// Who may change the Machine now.
    pub admission: Observed,
    /// The newest attempt and its derived state.
    #[serde(serialize_with = "seen")]
    pub last: Result<Option<Seen>, String>,
    /// Where these differ, or what is wrong with them.
    pub findings: Vec<String>,
    /// What this user could not see.
    pub unknown: Vec<String>,
}

/// Looks, and changes nothing: a daemon that an operator stopped is not started by it.
pub fn status(host: &Host) -> Status {
    let (inventory, damage) = Inventory::read(host);
    let file = on_disk(&host.installed());
    let in_place = file.as_ref().ok().and_then(|found| found.as_ref().map(|(_, sha256)| sha256.clone()));
    let process = look_at_process(host, file.as_ref().ok().and_then(|f| f.as_ref().map(|(inode, _)| *inode)));
    let api = match &process {
        Ok(process) if process.state == "active" => ask(host),
        Ok(process) => Err(format!("not asked: {SERVICE} is {}", process.state)),
        Err(e) => Err(format!("not asked, since it might start a daemon that was stopped: {e}")),
    };
    let installed = described(&host.installed(), file, [&inventory.current].into_iter());
    let retained = [&inventory.previous, &inventory.current].into_iter();
    let previous = described(&host.previous(), on_disk(&host.previous()), retained);
    let look = || admission(host, api.as_ref().ok());
    let view = View { admission: &look, in_place: in_place.as_deref() };
    let last = records::latest(host, view).map_err(|e| e.to_string());
    let admission = look();
    let changeable = [host.installed(), host.previous()];
    let changeable =
        changeable.iter().filter(|_| host.privileged()).filter_map(|path| writable_by_others(path));
    let mut status = Status {
        schema: 1,
        host: host.name(),
        installed,
        process,
        api,
        previous,
        admission,
        last,
        findings: damage.into_iter().chain(changeable).collect(),
        unknown: Vec::new(),
    };
    judge(&mut status);
    status
}

/// A file and what the installer wrote of exactly it.
fn described<'a>(
    path: &Path,
    file: std::io::Result<Option<(Inode, String)>>,
    mut written: impl Iterator<Item = &'a Option<Installed>>,
) -> Result<Option<OnDisk>, String> {
    let found = file.map_err(|e| format!("reading {path:?}: {e}"))?;
    Ok(found.map(|(_, sha256)| {
        let described = written.find_map(|entry| entry.clone().filter(|entry| entry.sha256 == sha256));
        OnDisk { described, sha256 }
    }))
}

/// What systemd and `/proc` say of the daemon.
pub(crate) fn look_at_process(host: &Host, installed: Option<Inode>) -> Result<Process, String> {
    if !host.systemd_runs() {
        return Err("systemd is not PID 1 here".into());
    }
    let shown = Systemd::new(DEADLINE).show(&[SERVICE, SOCKET, DOOR]).map_err(|e| e.to_string())?;
    let not_enabled =
        [SERVICE, SOCKET, DOOR].iter().zip(&shown).filter(|(_, unit)| unit.file_state == "disabled");
    let not_enabled = not_enabled.map(|(name, _)| (*name).to_owned()).collect();
    let is_closed = |(_, unit): &(_, &crate::systemd::Unit)| unit.load == "loaded" && unit.active != "active";
    let closed = [SOCKET, DOOR].iter().zip(&shown[1..]).filter(is_closed).map(|(name, _)| (*name).to_owned());
    let closed = closed.collect();
    let Some(unit) = shown.into_iter().next() else { return Err("systemd said nothing".into()) };
    let running = Inode::of(&PathBuf::from(format!("/proc/{}/exe", unit.main_pid))).ok();
    let state = if unit.load == "not-found" { "not installed".to_owned() } else { unit.active };
    Ok(Process {
        state,
        pid: (unit.main_pid != 0).then_some(unit.main_pid),
        since: unit.since,
        runs_installed: running.map(|running| Some(running) == installed),
        restarts: unit.restarts,
        not_enabled,
        closed,
        result: unit.result,
    })
}

/// Admission as this user may see it; the daemon sees it for those who may not open the lock file.
fn admission(host: &Host, api: Option<&Value>) -> Observed {
    let seen = admission::observe(host);
    let told = api.and_then(|api| serde_json::from_value(api.get("admission")?.clone()).ok());
    match (seen, told) {
        (Observed::Unknown { .. }, Some(told)) => told,
        (seen, _) => seen,
    }
}

fn ask(host: &Host) -> Result<Value, String> {
    let asked = crate::http::ask_blocking(&host.api(), hyper::Method::GET, "/v1/machine", None, DEADLINE);
    match asked {
        Ok((200, body)) => match serde_json::from_slice(&body) {
            Ok(mut answer) => {
                printable_value(&mut answer);
                Ok(answer)
            }
            Err(e) => Err(format!("the answer is not understood: {e}")),
        },
        Ok((status, _)) => Err(format!("the Machine API answered {status}")),
        Err(e) => Err(e.to_string()),
    }
}

/// Says where the three views differ. Works on the values alone.
fn judge(status: &mut Status) {
    let (findings, unknown) = (&mut status.findings, &mut status.unknown);
    let mut installed_version = None;
    match &status.installed {
        Ok(None) => findings.push("nothing is installed".into()),
        Ok(Some(OnDisk { described: None, sha256 })) => {
            findings
                .push(format!("the installed file ({}…) is not what installed.json describes", &sha256[..8]));
        }
        Ok(Some(OnDisk { described: Some(described), .. })) => {
            installed_version = Some(described.version.to_string());
            if !described.confirmed {
                findings.push(format!("{} was installed and never confirmed", described.version));
            }
        }
        Err(e) => unknown.push(e.clone()),
    }
    match &status.previous {
        Ok(Some(OnDisk { described: None, sha256 })) => {
            findings.push(format!(
                "the retained binary ({}…) is not what installed.json describes",
                &sha256[..8]
            ));
        }
        Ok(_) => {}
        Err(e) => unknown.push(e.clone()),
    }
    for name in status.process.iter().flat_map(|process| &process.not_enabled) {
        findings.push(format!("{name} is disabled: it does not start at boot (systemctl enable {name})"));
    }
    for name in status.process.iter().flat_map(|process| &process.closed) {
        findings.push(format!("{name} is closed: nobody can ask through it (systemctl start {name})"));
    }
    match &status.process {
        Ok(process) if process.state != "active" => findings.push(format!("the daemon is {}", process.state)),
        Ok(Process { runs_installed: Some(false), pid: Some(pid), .. }) => {
            findings.push(format!("process {pid} does not run the installed file"));
        }
        // Another user's process can't be looked into; the digest that it reports is compared below.
        Ok(_) => {}
        Err(e) => unknown.push(e.clone()),
    }
    match (&status.api, &status.process) {
        (Ok(api), _) => {
            let text = |field: &str| api.get(field).and_then(Value::as_str).map(str::to_owned);
            if let Some((runs, installed)) = text("version").zip(installed_version).filter(|(a, b)| a != b) {
                findings.push(format!("{runs} is running, and {installed} is installed"));
            }
            let on_disk = status.installed.as_ref().ok().and_then(Option::as_ref);
            if text("executable_sha256")
                .zip(on_disk)
                .is_some_and(|(digest, on_disk)| digest != on_disk.sha256)
            {
                findings.push("the running executable is not the installed file".into());
            }
            for problem in api.get("problems").and_then(Value::as_array).into_iter().flatten() {
                findings.push(problem.as_str().unwrap_or("a problem without a text").to_owned());
            }
        }
        (Err(e), Ok(process)) if process.state == "active" => unknown.push(e.clone()),
        _ => {}
    }
    match &status.last {
        Ok(Some(Seen { record, state, .. })) => {
            let stage = record.get("stage").and_then(Value::as_str).unwrap_or("an unknown stage");
            match state {
                State::Interrupted { evidence } => {
                    let installation =
                        record.get("installation").and_then(Value::as_str).unwrap_or("unknown");
                    findings.push(format!(
                        "the last attempt was interrupted at {stage}, installation {installation}: {evidence}"
                    ));
                }
                State::Unknown { why } => unknown.push(format!("whether the last attempt still runs: {why}")),
                State::Running | State::Ended => {}
            }
        }
        Ok(None) => {}
        Err(e) => unknown.push(e.clone()),
    }
    if let Observed::Unknown { why } = &status.admission {
        unknown.push(format!("who has admission: {why}"));
    }
}
