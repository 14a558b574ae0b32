//! `ployzd service deploy|list|remove`: requests to the Machine API, with progress as it comes.

use std::io::{self, IsTerminal};
use std::time::Duration;

use hyper::Method;
use serde_json::{Map, Value, json};

use super::Exit;
use super::output::{self, error};
use super::ployzd::Deploy;
use crate::docker::Lines;
use crate::host::Host;
use crate::http::{self, AskError, ask_blocking};
use crate::install::events::SCHEMA;
use crate::text::{printable, printable_value};

/// For an answer to a look.
const LOOK: Duration = Duration::from_secs(60);
/// Without a word of a change: longer than any of its stages is silent.
const SILENT: Duration = Duration::from_secs(25 * 60);

/// Deploys a service, and says what came of it.
pub(crate) fn deploy(host: &Host, arguments: &Deploy) -> Exit {
    match specification(arguments) {
        Ok(spec) => change(host, Method::POST, "/v1/services", Some(&spec), arguments.json, |done| {
            let name = printable(&arguments.name);
            match (done["nothing_was_needed"].as_bool(), done["replaced"].as_str()) {
                (Some(true), _) => format!("Nothing was needed: {name} runs as specified."),
                (_, Some(_)) => format!("{name} is deployed and works; the container before it is removed."),
                (_, None) => format!("{name} is deployed and works."),
            }
        }),
        Err(what) => {
            if arguments.json {
                refused(&json!({"type": "usage", "detail": what}));
            } else {
                error(what, Some("look at: ployzd service deploy --help"));
            }
            Exit::Usage
        }
    }
}

/// Removes a service.
pub(crate) fn remove(host: &Host, name: &str, json: bool) -> Exit {
    // It becomes part of a path; what it may be is said by the daemon.
    let uri = format!("/v1/services/{}", crate::docker::escaped(name));
    change(host, Method::DELETE, &uri, None, json, |done| {
        let kept = done["kept_volumes"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let kept: Vec<&str> = kept.collect();
        let kept =
            if kept.is_empty() { String::new() } else { format!("; kept: volumes {}", kept.join(", ")) };
        let note = done["note"].as_str().map(|note| format!(" ({note})")).unwrap_or_default();
        format!("{} is removed{note}{kept}.", printable(name))
    })
}

/// Shows what is deployed.
pub(crate) fn list(host: &Host, json: bool) -> Exit {
    let (status, answer) = match ask_blocking(&host.api(), Method::GET, "/v1/services", None, LOOK) {
        Ok(answer) => answer,
        Err(e) => return unreachable(&e, json, false),
    };
    let mut answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    printable_value(&mut answer);
    if status != 200 {
        return problem(&answer, json);
    }
    let mut out = output::stdout();
    if json {
        return if out.line(answer.to_string()).is_ok() { Exit::Done } else { Exit::Unknown };
    }
    let services = answer["services"].as_array().cloned().unwrap_or_default();
    if services.is_empty() && out.line("no service is deployed").is_err() {
        return Exit::Unknown;
    }
    let text = |service: &Value, field: &str| service[field].as_str().unwrap_or_default().to_owned();
    let rows = services.iter().map(|service| {
        let ports = service["ports"].as_array().into_iter().flatten();
        let ports =
            ports.map(|port| format!("{}→{}/{}", port["host"], port["container"], text(port, "protocol")));
        let mut ports: Vec<String> = ports.collect();
        ports.sort();
        ports.dedup();
        [
            text(service, "name"),
            text(service, "state"),
            text(service, "status"),
            text(service, "image"),
            ports.join(" "),
        ]
    });
    let rows: Vec<[String; 5]> = rows.collect();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..4).map(width).collect();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(at, cell)| {
            let pad = widths.get(at).map_or(0, |width| width.saturating_sub(cell.chars().count()));
            format!("{cell}{}", " ".repeat(pad))
        });
        if out.line(cells.collect::<Vec<_>>().join("  ").trim_end()).is_err() {
            return Exit::Unknown;
        }
    }
    Exit::Done
}

/// From flags to the specification, whose meaning the daemon checks.
fn specification(arguments: &Deploy) -> Result<Value, String> {
    let mut environment = Map::new();
    for variable in &arguments.env {
        let (name, value) =
            variable.split_once('=').ok_or_else(|| format!("{variable:?} is not NAME=VALUE"))?;
        if environment.insert(name.to_owned(), value.into()).is_some() {
            return Err(format!("variable {name} is named twice"));
        }
    }
    let ports: Result<Vec<Value>, String> = arguments.publish.iter().map(|text| port(text)).collect();
    let volumes: Result<Vec<Value>, String> = arguments.volume.iter().map(|text| volume(text)).collect();
    let mut spec = json!({
        "name": arguments.name, "image": arguments.image, "command": arguments.command,
        "environment": environment, "ports": ports?, "volumes": volumes?, "restart": arguments.restart,
        "pull": arguments.pull,
    });
    if let Some(command) = &arguments.health_command {
        spec["health"] = json!({
            "command": [command], "interval": arguments.health_interval, "retries": arguments.health_retries,
            "start": arguments.health_start,
        });
    }
    Ok(spec)
}

/// `8080:80`, `127.0.0.1:53:53/udp`, `[::1]:8080:80`
fn port(text: &str) -> Result<Value, String> {
    let not = || format!("{text:?} is not [ADDRESS:]HOST:CONTAINER[/udp]");
    let (numbers, protocol) = match text.rsplit_once('/') {
        Some((numbers, protocol)) => (numbers, protocol),
        None => (text, "tcp"),
    };
    let (rest, container) = numbers.rsplit_once(':').ok_or_else(not)?;
    let (address, host) = match rest.rsplit_once(':') {
        Some((address, host)) => (Some(address.trim_start_matches('[').trim_end_matches(']')), host),
        None => (None, rest),
    };
    let number = |text: &str| text.parse::<u16>().map_err(|_| not());
    let mut port = json!({"host": number(host)?, "container": number(container)?, "protocol": protocol});
    if let Some(address) = address {
        address.parse::<std::net::IpAddr>().map_err(|_| not())?;
        port["address"] = address.into();
    }
    Ok(port)
}

/// `data:/data`, `data:/data:ro`
fn volume(text: &str) -> Result<Value, String> {
    let words: Vec<&str> = text.split(':').collect();
    match words.as_slice() {
        [name, target] => Ok(json!({"name": name, "target": target})),
        [name, target, "ro"] => Ok(json!({"name": name, "target": target, "read_only": true})),
        _ => Err(format!("{text:?} is not NAME:/PATH[:ro]")),
    }
}

/// Asks for a change, shows how far it is, and says what came of it.
fn change(
    host: &Host,
    method: Method,
    uri: &str,
    body: Option<&Value>,
    json: bool,
    say: impl Fn(&Value) -> String,
) -> Exit {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            error(e.to_string(), Some("try again"));
            return Exit::Unchanged;
        }
    };
    let mut lines = Lines::default();
    let (mut plain, mut outcome) = (Vec::new(), None);
    let mut progress = ProgressLine::new(json);
    let mut sink = |status: u16, bytes: &[u8]| {
        if status != 200 {
            plain.extend_from_slice(bytes);
            return if plain.len() > 1024 * 1024 { Err("the answer does not end".into()) } else { Ok(()) };
        }
        plain.extend_from_slice(&bytes[..bytes.len().min(65536_usize.saturating_sub(plain.len()))]);
        let mut take = |mut value: Value| {
            printable_value(&mut value);
            match value["event"].as_str() {
                Some("progress") => progress.show(&value["progress"]),
                Some("outcome") => outcome = Some(value),
                _ => {}
            }
        };
        // An answer that is no lines ends without a newline, and is read as a whole.
        lines.take(bytes, &mut take)
    };
    let headers = [("accept", "application/x-ndjson")];
    let api = host.api();
    let asked = runtime.block_on(http::stream(&api, method, uri, &headers, body, SILENT, &mut sink));
    progress.end();
    let outcome = match (asked, outcome) {
        (Ok(_), Some(outcome)) => outcome,
        (Ok(200), None) => match serde_json::from_slice::<Value>(&plain) {
            Ok(done) => json!({"done": done}),
            Err(_) => return unknown("the connection ended before the outcome", json),
        },
        (Ok(_), None) => json!({"problem": serde_json::from_slice::<Value>(&plain).unwrap_or_default()}),
        (Err(e), _) => return unreachable(&e, json, true),
    };
    if !outcome["problem"].is_null() {
        let mut shown = outcome["problem"].clone();
        printable_value(&mut shown);
        return problem(&shown, json);
    }
    let mut done = outcome["done"].clone();
    printable_value(&mut done);
    let mut out = output::stdout();
    let told = if json { out.line(event("outcome", json!({"done": done}))) } else { out.line(say(&done)) };
    if told.is_ok() { Exit::Done } else { Exit::Unknown }
}

fn event(event: &str, fields: Value) -> String {
    let mut value = json!({"schema": SCHEMA, "event": event, "at": jiff::Timestamp::now()});
    if let (Some(value), Value::Object(fields)) = (value.as_object_mut(), fields) {
        value.extend(fields);
    }
    value.to_string()
}

fn refused(problem: &Value) {
    let _ = output::stdout().line(event("outcome", json!({"refused": problem})));
}

/// How far it is, a line a stage; bytes on a terminal only.
struct ProgressLine {
    json: bool,
    bytes: bool,
}

impl ProgressLine {
    fn new(json: bool) -> Self {
        Self { json, bytes: false }
    }

    fn show(&mut self, progress: &Value) {
        let mut out = output::stdout();
        if self.json {
            let _ = out.line(event("progress", json!({"progress": progress})));
            return;
        }
        let stage = progress["stage"].as_str().unwrap_or_default();
        match progress["bytes"].as_u64() {
            None => {
                self.end();
                let _ = out.field(stage, progress["detail"].as_str().unwrap_or_default());
            }
            Some(bytes) if io::stdout().is_terminal() => {
                self.bytes = true;
                let megabytes = |bytes: u64| format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10);
                let total = progress["total"].as_u64().unwrap_or_default();
                let _ = out.again(format!("  {stage:<12}{} of {}", megabytes(bytes), megabytes(total)));
            }
            Some(_) => {}
        }
    }

    fn end(&mut self) {
        if self.bytes {
            self.bytes = false;
            let _ = output::stdout().again("");
        }
    }
}

/// Says why it was not done.
fn problem(problem: &Value, json: bool) -> Exit {
    let text = |field: &str| problem[field].as_str().unwrap_or_default();
    if json {
        refused(problem);
    } else {
        let detail =
            Some(text("detail")).filter(|text| !text.is_empty()).unwrap_or("the Machine API said no");
        error(detail, None);
        let mut err = output::stderr();
        let now = Some(text("now")).filter(|now| !now.is_empty());
        let _ = now.map(|now| err.line(format!("Now: {now}.")));
        for help in problem["help"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let _ = err.help(help);
        }
    }
    match text("type").trim_start_matches("urn:ployz:problem:") {
        "busy" => Exit::Busy,
        "not-permitted" => Exit::NotPermitted,
        "unknown" | "goes-on" => Exit::Unknown,
        _ => Exit::Unchanged,
    }
}

fn unknown(what: &str, json: bool) -> Exit {
    let help = "see what becomes of it: ployzd service list";
    if json {
        refused(&json!({"type": "unknown", "detail": what, "help": [help]}));
    } else {
        error(format!("{what}; whether it was done is not known"), Some(help));
    }
    Exit::Unknown
}

fn unreachable(e: &AskError, json: bool, changes: bool) -> Exit {
    let (help, exit) = match e {
        AskError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            ("use sudo, or ask root for: usermod -a -G ployz USER", Exit::NotPermitted)
        }
        AskError::Connect { .. } => ("look at: systemctl status ployz.socket", Exit::Unchanged),
        _ if changes => return unknown(&e.to_string(), json),
        _ => ("look at: ployzd status", Exit::Unknown),
    };
    if json {
        refused(&json!({"type": "unreachable", "detail": e.to_string(), "help": [help]}));
    } else {
        error(e.to_string(), Some(help));
    }
    exit
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn ports_and_volumes_are_read_as_they_are_written() {
        let tcp =
            |host: u16, container: u16| json!({"host": host, "container": container, "protocol": "tcp"});
        assert_eq!(port("8080:80").unwrap(), tcp(8080, 80));
        let mut local = tcp(53, 53);
        local["protocol"] = "udp".into();
        local["address"] = "127.0.0.1".into();
        assert_eq!(port("127.0.0.1:53:53/udp").unwrap(), local);
        let mut six = tcp(8080, 80);
        six["address"] = "::1".into();
        assert_eq!(port("[::1]:8080:80").unwrap(), six);
        for bad in ["80", "a:80", "1:2:3", "80:", ":80", "70000:80", "host:80:80"] {
            assert!(port(bad).is_err(), "{bad}");
        }
        assert_eq!(volume("data:/data:ro").unwrap()["read_only"], true);
        assert!(volume("data").is_err() && volume("data:/data:rw:x").is_err());
    }
}
