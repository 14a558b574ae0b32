//! `ployzd status`: one line a fact.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::Value;

use super::Exit;
use super::output::{self, Output, Style};
use crate::host::Host;
use crate::install::admission::Observed;
use crate::install::attempt::State;
use crate::install::records::Seen;
use crate::install::status::{self, OnDisk, Status};

/// Shows the Machine. 0: running as installed; 4: something differs; 6: something could not be seen.
pub(crate) fn run(host: &Host, json: bool) -> Exit {
    let status = status::status(host);
    let mut out = output::stdout();
    let shown = if json {
        out.line(serde_json::to_string(&status).unwrap_or_default())
    } else {
        show(&mut out, &status)
    };
    if shown.is_err() {
        return Exit::Unknown;
    }
    match (status.findings.is_empty(), status.unknown.is_empty()) {
        (false, _) => Exit::Unchanged,
        (true, false) => Exit::Unknown,
        (true, true) => Exit::Done,
    }
}

fn show(out: &mut Output<std::io::Stdout>, status: &Status) -> std::io::Result<()> {
    let api = status.api.as_ref().ok();
    let text = |field: &str| api.and_then(|api| api.get(field)).and_then(Value::as_str);
    let id = text("id").map(|id| format!("  {}", short(id))).unwrap_or_default();
    out.line(format!(
        "{}{id}  {}",
        text("name").unwrap_or(&status.host),
        text("phase").unwrap_or("phase unknown")
    ))?;
    out.field("running", running(status))?;
    out.field("installed", binary(&status.installed))?;
    out.field("previous", binary(&status.previous))?;
    out.field("last", last(status))?;
    out.field("admission", admission(&status.admission, api))?;
    if let Some(api) = api {
        let state = |field: &str| {
            api.get(field).and_then(|v| v.get("state")).and_then(Value::as_str).unwrap_or("unknown")
        };
        let paired = api.get("cloud").and_then(|cloud| cloud.get("paired")).and_then(Value::as_bool);
        let docker = api.get("docker");
        let version = docker.and_then(|docker| docker.get("version")).and_then(Value::as_str);
        let running = docker.and_then(|docker| docker.get("running")).and_then(Value::as_u64);
        out.field(
            "docker",
            match (version, running) {
                (Some(version), Some(running)) => format!("{version}  {running} containers"),
                _ => state("docker").to_owned(),
            },
        )?;
        out.field("cloud", if paired == Some(true) { "paired" } else { "not paired" })?;
    }
    for finding in &status.findings {
        out.line(out.styled(Style::Red, format!("differs: {finding}")))?;
    }
    for unknown in &status.unknown {
        out.line(format!("not seen: {unknown}"))?;
    }
    if !status.unknown.is_empty() && !nix::unistd::Uid::effective().is_root() {
        out.help("root sees more: sudo /usr/local/bin/ployzd status")?;
    } else if text("phase") == Some("damaged") {
        out.help(
            "restore the identity from a copy, or give this Machine a new one: sudo ployzd machine reset",
        )?;
    } else if !status.findings.is_empty() && status.api.is_err() && matches!(status.previous, Ok(Some(_))) {
        out.help("to put the previous release back: sudo /usr/local/bin/ployzd.previous recover")?;
        out.help("to see why: journalctl -u ployz.service -n 20")?;
    } else if !status.findings.is_empty() {
        out.help("to repair what is installed: sudo /usr/local/bin/ployzd install")?;
        out.help("to see why: journalctl -u ployz.service -n 20")?;
    }
    Ok(())
}

fn running(status: &Status) -> String {
    let process = match &status.process {
        Ok(process) => process,
        Err(e) => return format!("unknown: {e}"),
    };
    let Some(pid) = process.pid else {
        return match process.result.as_str() {
            "" | "success" => format!("no ({})", process.state),
            result => format!("no ({}: {result}, {} restarts)", process.state, process.restarts),
        };
    };
    let api = match &status.api {
        Ok(api) => api,
        Err(e) => return format!("pid {pid}  {}  {e}", process.state),
    };
    let version = api.get("version").and_then(Value::as_str).unwrap_or("version unknown");
    let since = api.get("started_at").and_then(Value::as_str).and_then(|t| t.parse().ok());
    let since = since.map_or_else(|| process.since.clone(), clock);
    let ready = if api.get("ready").and_then(Value::as_bool) == Some(true) { "ready" } else { "NOT READY" };
    // What the kernel shows counts before what the daemon says of itself.
    let says = api.get("executable_sha256").and_then(Value::as_str);
    let file = match (process.runs_installed, says, &status.installed) {
        (Some(true), ..) => "runs the installed file",
        (Some(false), ..) => "NOT the installed file",
        (None, Some(digest), Ok(Some(on_disk))) if digest == on_disk.sha256 => {
            "says it runs the installed file"
        }
        (None, Some(_), Ok(Some(_))) => "NOT the installed file",
        (None, ..) => "which file is unknown",
    };
    format!("{version}  pid {pid}  since {since}  {ready}  {file}")
}

/// A binary: its version, digest, and since when it is known to be good.
fn binary(file: &Result<Option<OnDisk>, String>) -> String {
    let on_disk = match file {
        Err(e) => return format!("unknown: {e}"),
        Ok(None) => return "none".into(),
        Ok(Some(on_disk)) => on_disk,
    };
    let digest = short(&on_disk.sha256);
    let Some(described) = &on_disk.described else {
        return format!("{digest}  NOT DESCRIBED by installed.json");
    };
    let at = clock(described.confirmed_at.unwrap_or(described.installed_at));
    let how = if described.confirmed { "confirmed" } else { "NOT CONFIRMED, put in place" };
    format!("{}  {digest}  {how} {at}", described.version)
}

fn last(status: &Status) -> String {
    let Seen { record, state, .. } = match &status.last {
        Ok(Some(found)) => found,
        Ok(None) => return "no attempt is recorded".into(),
        Err(e) => return format!("unknown: {e}"),
    };
    let text = |field: &str| record.get(field).and_then(Value::as_str).unwrap_or("?");
    let from =
        record.get("from").and_then(Value::as_str).map(|from| format!("{from} → ")).unwrap_or_default();
    let at = record.get("ended_at").and_then(Value::as_str).and_then(|t| t.parse().ok()).map(clock);
    let installation = text("installation");
    let how = match state {
        State::Running => format!("running, at {}", text("stage")),
        State::Interrupted { .. } => format!("INTERRUPTED at {}, installation {installation}", text("stage")),
        State::Unknown { why } => format!("unknown: {why}"),
        State::Ended => {
            match record.get("outcome").and_then(Value::as_object).and_then(|o| o.iter().next()) {
                Some((kind, detail)) => {
                    let stage = detail.get("stage").and_then(Value::as_str);
                    let stage =
                        stage.map(|s| format!(" at {s}, installation {installation}")).unwrap_or_default();
                    format!("{kind}{stage}")
                }
                None => "ended in a way that this release does not know".into(),
            }
        }
    };
    let at = at.map(|at| format!("  {at}")).unwrap_or_default();
    format!("{} {from}{}  {how}{at}  ({})", text("kind"), text("target"), short(text("id")))
}

fn admission(observed: &Observed, api: Option<&Value>) -> String {
    let api = api.and_then(|api| api.get("admission"));
    let said = |field: &str| api.and_then(|a| a.get(field)).and_then(Value::as_str);
    match observed {
        Observed::Free => "free".into(),
        Observed::Installing { holder: Some(holder) } => {
            format!(
                "{} {} since {} (pid {})",
                holder.kind,
                short(&holder.attempt),
                clock(holder.since),
                holder.pid
            )
        }
        Observed::Installing { holder: None } => "an installation".into(),
        Observed::Mutating { doing: Some(doing) } => format!("{} since {}", doing.what, clock(doing.since)),
        Observed::Mutating { doing: None } => said("what").unwrap_or("a change by the daemon").to_owned(),
        // The daemon may look where we may not.
        Observed::Unknown { why } => match said("state") {
            Some(state) => state.to_owned(),
            None => format!("unknown: {why}"),
        },
    }
}

fn short(text: &str) -> String {
    text.chars().take(8).collect()
}

/// "12:01:17", with the date when it is not of today.
pub(crate) fn clock(at: Timestamp) -> String {
    let zone = TimeZone::system();
    let (at, now) = (at.to_zoned(zone.clone()), Timestamp::now().to_zoned(zone));
    let format = if at.date() == now.date() { "%H:%M:%S" } else { "%Y-%m-%d %H:%M:%S" };
    at.strftime(format).to_string()
}
