//! `ployzd machine initialize` and `reset`: requests to the Machine API.

use std::io::{self, BufRead, IsTerminal};
use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};

use super::Exit;
use super::output::{self, error};
use crate::host::Host;
use crate::http::{AskError, ask_blocking};

const DEADLINE: Duration = Duration::from_secs(15);
/// For a reset, which stops containers.
const RESET: Duration = Duration::from_secs(600);

/// Gives the Machine an identity.
pub(crate) fn initialize(host: &Host, name: Option<String>, json: bool) -> Exit {
    let body = name.map_or_else(|| json!({}), |name| json!({"name": name}));
    post(host, "/v1/machine/initialize", &body, DEADLINE, json, |machine| {
        format!("initialized as {} ({})", text(machine, "name"), text(machine, "id"))
    })
}

/// Removes the Machine's identity, after a question on a terminal.
pub(crate) fn reset(host: &Host, yes: bool, json: bool) -> Exit {
    if !yes && !confirmed() {
        error(
            "resetting removes this Machine's identity and services; nothing was changed",
            Some("to go on: ployzd machine reset --yes"),
        );
        return Exit::Unchanged;
    }
    post(host, "/v1/machine/reset", &json!({}), RESET, json, |_| {
        "reset: this Machine has no identity and no services now".to_owned()
    })
}

fn confirmed() -> bool {
    if !io::stdin().is_terminal() {
        return false;
    }
    let _ = output::stderr()
        .line("This removes the Machine's identity and its services; volumes stay. Type yes to go on:");
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.is_ok() && answer.trim() == "yes"
}

fn text<'a>(machine: &'a Value, field: &str) -> &'a str {
    machine.get(field).and_then(Value::as_str).unwrap_or("unknown")
}

fn post(
    host: &Host,
    uri: &str,
    body: &Value,
    deadline: Duration,
    json: bool,
    say: impl Fn(&Value) -> String,
) -> Exit {
    let (status, answer) = match ask_blocking(&host.api(), Method::POST, uri, Some(body), deadline) {
        Ok(answer) => answer,
        Err(e) => return unreachable(&e),
    };
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    let mut out = output::stdout();
    if (200..300).contains(&status) {
        let _ = out.line(if json { answer.to_string() } else { say(&answer) });
        return Exit::Done;
    }
    if json {
        let _ = out.line(answer.to_string());
    } else {
        error(format!("{}; nothing was changed", text(&answer, "detail")), Some("look at: ployzd status"));
    }
    match (status, text(&answer, "type")) {
        (409, "urn:ployz:problem:busy") => Exit::Busy,
        (403, _) => Exit::NotPermitted,
        (500.., _) => Exit::Unknown,
        _ => Exit::Unchanged,
    }
}

fn unreachable(e: &AskError) -> Exit {
    let (help, exit) = match e {
        AskError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            ("use sudo, or ask root for: usermod -a -G ployz USER", Exit::NotPermitted)
        }
        AskError::Connect { .. } => ("look at: systemctl status ployz.socket", Exit::Unchanged),
        // Whether it was done is not known.
        _ => ("see what is so now: ployzd status", Exit::Unknown),
    };
    error(e.to_string(), Some(help));
    exit
}
