//! `ployzd uninstall`: a question, and then item by item what is gone and what stays.

use std::io::{self, BufRead, IsTerminal};

use serde_json::json;

use super::Exit;
use super::install::{log, own_path, refuse, run_from_staging};
use super::output::{self, Style};
use super::ployzd::Uninstall;
use crate::host::Host;
use crate::install::events::{Refusal, SCHEMA};
use crate::install::preflight::Problem;
use crate::install::uninstall::{self, Report};
use crate::interrupt::Interrupt;

/// Removes Ployz, and says what is gone. 0: all of it; 4: nothing was changed; 5: something is left.
pub(crate) fn run(host: &Host, arguments: &Uninstall) -> Exit {
    let removed = prepared(host, arguments).and_then(|()| {
        let interrupt =
            Interrupt::hold().map_err(|e| Refusal::one(format!("holding signals back: {e}"), "try again"))?;
        uninstall::uninstall(host, arguments.purge, &interrupt)
    });
    match removed {
        Ok(report) => show(&report, arguments.json),
        Err(refusal) => refuse(&refusal, arguments.json),
    }
}

/// What can be refused before anything is looked at; afterwards this process runs from a copy, in a scope of its own.
fn prepared(host: &Host, arguments: &Uninstall) -> Result<(), Refusal> {
    if !host.privileged() {
        let help = format!("type: sudo {} uninstall", own_path());
        let what = "removing Ployz needs root, and this is not root".into();
        return Err(Refusal::NotPermitted(Problem { what, help }));
    }
    let purge = if arguments.purge { " --purge" } else { "" };
    let go_on = format!("to go on without being asked: sudo {} uninstall{purge} --yes", own_path());
    let asks = !arguments.yes && !arguments.json && io::stdin().is_terminal();
    if !arguments.yes && !asks {
        return Err(Refusal::one("removing Ployz is asked for on a terminal, and this is none", go_on));
    }
    crate::install::can_run_children(host)?;
    // Asked before this process becomes its copy, which is told that it may.
    if asks && !is_copy() && !confirmed(host, arguments.purge) {
        return Err(Refusal::one("it was not confirmed", go_on));
    }
    run_from_staging(host, true).map_err(|e| {
        let what = format!("making a copy to run from in {}: {e}", host.own_copies().display());
        Refusal::one(what, "look at: findmnt -T /usr/local/lib; df -h /usr/local")
    })?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    log();
    Ok(())
}

fn is_copy() -> bool {
    std::env::var_os(super::install::BECAME).is_some()
}

fn confirmed(host: &Host, purge: bool) -> bool {
    let mut err = output::stderr();
    let data = if purge { ", its state, records, settings and accounts" } else { "" };
    let _ = err.line(format!(
        "This removes Ployz from {}: the daemon, its services' containers{data}.",
        host.name()
    ));
    let _ = err.line("Docker, images and named volumes stay. Type yes to go on:");
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.is_ok() && answer.trim() == "yes"
}

fn show(report: &Report, json: bool) -> Exit {
    let mut out = output::stdout();
    if json {
        let mut line = json!({"schema": SCHEMA, "event": "outcome", "at": jiff::Timestamp::now()});
        if let (Some(line), Ok(serde_json::Value::Object(fields))) =
            (line.as_object_mut(), serde_json::to_value(report))
        {
            line.extend(fields);
        }
        let _ = out.line(line.to_string());
    } else {
        if report.removed.is_empty() && report.failed.is_empty() {
            let _ = out.line("Nothing of Ployz was here to be removed.");
        }
        for what in &report.removed {
            let _ = out.field("removed", what);
        }
        for kept in &report.kept {
            let _ = out.field("kept", format!("{}  ({})", kept.what, kept.why));
        }
        let mut err = output::stderr();
        for failed in &report.failed {
            let text = format!("not removed: {}: {}", failed.what, failed.error);
            let _ = err.line(err.styled(Style::Red, text));
            let _ = err.help(&failed.help);
        }
        if !report.failed.is_empty() {
            let _ = err.line("The rest is gone. Type the same again to go on.");
        }
    }
    if report.failed.is_empty() { Exit::Done } else { Exit::Replaced }
}
