//! `ployzd upgrade-worker`, `deploy-worker` and what is left to do when they have ended: what systemd starts for a
//! connection of a door.

use super::Exit;
use super::output::error;
use crate::deploy;
use crate::host::Host;
use crate::install::records;
use crate::install::worker;
use crate::interrupt::Interrupt;

/// Serves one connection. A refusal is an answer, and the unit's success.
pub(crate) fn run(host: &Host, version: &'static str) -> Exit {
    super::install::log();
    // Whatever is made has the mode that it is given.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    let (version, interrupt) = match (version.parse(), Interrupt::hold()) {
        (Ok(version), Ok(interrupt)) => (version, interrupt),
        (Err(_), _) => return failed(format!("this executable has no release version ({version})")),
        (_, Err(e)) => return failed(format!("holding signals back: {e}")),
    };
    match worker::serve(host, version, &interrupt) {
        Ok(Some(record)) => super::install::exit_of(&record),
        Ok(None) => Exit::Done,
        Err(e) => failed(e.to_string()),
    }
}

/// Serves one connection of the deploy door. A refusal or failure is an answer, and the unit's success.
pub(crate) fn deploy(host: &Host) -> Exit {
    super::install::log();
    match deploy::worker::serve(host) {
        Ok(()) => Exit::Done,
        Err(e) => failed(format!("serving the deploy door: {e}")),
    }
}

/// Ends what a worker of the deploy door left in the middle.
pub(crate) fn deploy_ended(host: &Host) -> Exit {
    super::install::log();
    match deploy::worker::ended(host) {
        Ok(()) => Exit::Done,
        Err(e) => failed(format!("ending a Deploy that was cut off: {e}")),
    }
}

fn failed(what: String) -> Exit {
    error(what, Some("it is started by its socket: systemctl list-units 'ployz-*.socket'"));
    Exit::Raw(1)
}

/// Writes down how the unit ended, as systemd says in the environment, for an attempt that did not say so itself.
pub(crate) fn ended(host: &Host) -> Exit {
    super::install::log();
    let word = |name: &str| {
        let value = std::env::var(name).unwrap_or_default();
        value.chars().filter(char::is_ascii_graphic).take(64).collect::<String>()
    };
    let result = [word("SERVICE_RESULT"), word("EXIT_CODE"), word("EXIT_STATUS")];
    let [service, code, status] = &result;
    match records::leave_exit_evidence(host, &word("INVOCATION_ID"), [service, code, status]) {
        Ok(None) => Exit::Done,
        Ok(Some(id)) => {
            tracing::warn!(
                ployz_attempt = id,
                "attempt {id} did not come to its end; its unit ended: {service} {code} {status}"
            );
            Exit::Done
        }
        Err(e) => failed(format!("leaving how the unit ended: {e}")),
    }
}
