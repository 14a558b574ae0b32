//! `ployzd recover`: what would be put back is shown, a person says yes, and it is.

use std::io::{self, BufRead, IsTerminal};

use super::Exit;
use super::install::{Screen, conclude, exit_of, log, own_path, refuse, run_from_staging};
use super::output;
use super::ployzd::Recover;
use super::status::clock;
use crate::host::Host;
use crate::install::events::Refusal;
use crate::install::installed::Installed;
use crate::install::preflight::Problem;
use crate::install::recover::{self, Recovery};
use crate::install::release::Version;
use crate::interrupt::Interrupt;

/// Puts the retained release back, and says how it went.
pub(crate) fn run(host: &Host, version: &'static str, arguments: &Recover) -> Exit {
    let asks = !arguments.yes && !arguments.json && io::stdin().is_terminal();
    match prepared(host, version, arguments.yes || asks) {
        Ok(own_version) => carry_out(host, own_version, arguments, asks),
        Err(refusal) => refuse(&refusal, arguments.json),
    }
}

/// What can be refused before anything is looked at; afterwards this process runs from a copy, in a scope of its own.
fn prepared(host: &Host, version: &'static str, may_go_on: bool) -> Result<Version, Refusal> {
    if !host.privileged() {
        let help = format!("type: sudo {} recover", own_path());
        let what = "putting a release back needs root, and this is not root".into();
        return Err(Refusal::NotPermitted(Problem { what, help }));
    }
    if !may_go_on {
        let help = format!("to go on without being asked: sudo {} recover --yes", own_path());
        return Err(Refusal::one(
            "putting a release back is asked for on a terminal, and this is none",
            help,
        ));
    }
    let own_version = version.parse().map_err(|_| {
        let what = format!("this executable has no release version ({version})");
        Refusal::one(what, "use an executable of a release")
    })?;
    crate::install::can_run_children(host)?;
    run_from_staging(host, true).map_err(|e| {
        let what = format!("making a copy to run from in {}: {e}", host.own_copies().display());
        Refusal::one(what, "look at: findmnt -T /usr/local/lib; df -h /usr/local")
    })?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    log();
    Ok(own_version)
}

fn carry_out(host: &Host, own_version: Version, arguments: &Recover, asks: bool) -> Exit {
    let signals = |e: io::Error| Refusal::one(format!("holding signals back: {e}"), "try again");
    // Until a person has said yes Ctrl-C ends this as it ends everything.
    let looked = Interrupt::never().map_err(signals);
    let recovery = match looked.and_then(|never| recover::look(host, own_version, &never)) {
        Ok(recovery) => recovery,
        Err(refusal) => return refuse(&refusal, arguments.json),
    };
    if !arguments.json && show(host, &recovery).is_err() {
        return Exit::Unknown;
    }
    if asks && !confirmed() {
        let help = format!("to go on: sudo {} recover --yes", host.previous().display());
        return refuse(&Refusal::one("it was not confirmed", help), false);
    }
    let interrupt = match Interrupt::hold().map_err(signals) {
        Ok(interrupt) => interrupt,
        Err(refusal) => return refuse(&refusal, arguments.json),
    };
    let mut screen = Screen::new(host, "putting back", arguments.json);
    let recovered =
        recover::recover(host, &recovery, own_version, &interrupt, &mut |event| screen.show(event));
    screen.end();
    match recovered {
        Ok(record) => {
            if !arguments.json {
                conclude(host, &record);
            }
            exit_of(&record)
        }
        Err(refusal) => refuse(&refusal, arguments.json),
    }
}

/// What is put back, what it takes the place of, and what that does not do.
fn show(host: &Host, recovery: &Recovery) -> io::Result<()> {
    let mut out = output::stdout();
    let described = |installed: &Option<Installed>| match installed {
        Some(Installed { confirmed: true, confirmed_at: Some(at), .. }) => {
            format!("confirmed {}", clock(*at))
        }
        Some(_) => "never confirmed".into(),
        None => "not described by installed.json".into(),
    };
    out.line(format!("This puts a release back on {}:", host.name()))?;
    let back = format!("{}  {}  {}", recovery.version, &recovery.sha256[..8], described(&recovery.described));
    out.field("back", back)?;
    let instead = match (&recovery.in_place, &recovery.current) {
        (None, _) => "nothing: no executable is in place".into(),
        (Some(sha256), _) if *sha256 == recovery.sha256 => {
            "it is in place already, and is made to run".into()
        }
        (Some(sha256), Some(current)) => {
            format!("{}  {}  {}", current.version, &sha256[..8], described(&recovery.current))
        }
        (Some(sha256), None) => format!("{}  not described by installed.json", &sha256[..8]),
    };
    out.field("instead of", instead)?;
    out.line(
        "The daemon is stopped meanwhile, and what it does ends; containers go on. No data is rolled back:",
    )?;
    out.line("older software may not understand what newer software has written.")
}

/// Whether a person types yes.
fn confirmed() -> bool {
    let _ = output::stderr().line("Type yes to go on:");
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.is_ok() && answer.trim() == "yes"
}
