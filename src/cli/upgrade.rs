//! `ployzd upgrade`: asks the daemon, and follows the attempt across the restart that cuts the connection.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::Exit;
use super::attempt::{self, exit_of, outcome, outcome_event, short, text, time};
use super::output::{self, Output, error};
use super::ployzd::Upgrade;
use crate::durable::random_hex;
use crate::host::Host;
use crate::http::{AskError, ask};
use crate::install::attempt::{State, is_id};
use crate::install::events::SCHEMA;
use crate::install::records::{self, Seen};
use crate::install::upgrade::Selection;
use crate::text::printable_value;

/// For the answer of a daemon that has nothing to do for it.
const ANSWER: Duration = Duration::from_secs(5);
/// For the answer to a request: a lookup at the release source, and the door.
const ACCEPT: Duration = Duration::from_secs(130);
/// For the next change of an attempt, and for its answer.
const CHANGE: Duration = Duration::from_secs(25);
/// Between two tries while nobody answers.
const AGAIN: Duration = Duration::from_millis(50);
/// Without an answer and without a change of the record: what became of it is unknown then.
const PATIENCE: Duration = Duration::from_secs(120);
/// For the evidence that the unit of an interrupted attempt leaves.
const EVIDENCE: Duration = Duration::from_secs(1);

/// Asks for an upgrade and says how it went.
pub(crate) fn run(host: &Host, arguments: &Upgrade) -> Exit {
    let id = match (&arguments.attempt, random_hex(16)) {
        (Some(id), _) if is_id(id) => id.clone(),
        (None, Ok(id)) => id,
        (Some(id), _) => {
            error(format!("{id:?} is not an attempt's id: 32 lower-case hex digits"), None);
            return Exit::Usage;
        }
        (None, Err(e)) => {
            error(format!("making an id: {e}"), None);
            return Exit::Unchanged;
        }
    };
    let selection = match (arguments.version, arguments.channel) {
        (Some(version), _) => Selection::Exact(version),
        (None, Some(channel)) => Selection::Channel(channel),
        (None, None) => return Exit::Usage,
    };
    wait_for(async {
        let seen = match request(host, &id, selection, arguments.json).await {
            Ok(seen) => seen,
            Err(exit) => return exit,
        };
        let mut screen = Screen::new(arguments.json);
        screen.accepted(&seen);
        if arguments.no_follow {
            if arguments.json {
                let _ = screen.out.line(outcome_event(&seen));
            }
            return Exit::Done;
        }
        follow(host, seen, screen).await
    })
}

/// Follows an attempt that runs.
pub(crate) fn follow_to_the_end(host: &Host, seen: &Seen, json: bool) -> Exit {
    let mut screen = Screen::new(json);
    screen.accepted(seen);
    wait_for(follow(host, seen.clone(), screen))
}

fn wait_for(what: impl Future<Output = Exit>) -> Exit {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(what),
        Err(e) => {
            error(e.to_string(), None);
            Exit::Unknown
        }
    }
}

/// Asks until it is known whether the request was accepted.
async fn request(host: &Host, id: &str, selection: Selection, json: bool) -> Result<Seen, Exit> {
    let api = host.api();
    let machine = match ask(&api, Method::GET, "/v1/machine", None, ANSWER).await {
        Ok((200, body)) => parsed(&body),
        Ok((status, _)) => {
            return Err(silent(host, selection, &format!("the Machine API answered {status}"), json));
        }
        Err(AskError::Connect { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            let what = "this user may not use the Machine API";
            let help = "use sudo, or ask root for: usermod -a -G ployz USER";
            return Err(refused(Exit::NotPermitted, "not_permitted", what, &[help.into()], json));
        }
        Err(e) => return Err(silent(host, selection, &e.to_string(), json)),
    };
    if !json {
        let wanted = match selection {
            Selection::Exact(version) => version.to_string(),
            Selection::Channel(channel) => format!("what {channel} points to"),
        };
        let _ = output::stdout()
            .line(format!("asking for {wanted}; this Machine runs {}", text(&machine, "version")));
    }
    let body = json!({"attempt": id, "release": selection});
    let mut tries = 0;
    loop {
        tries += 1;
        let e = match ask(&api, Method::POST, "/v1/upgrades", Some(&body), ACCEPT).await {
            Ok((200 | 202, answer)) => {
                return serde_json::from_value(parsed(&answer)).map_err(|e| {
                    unknown(id, &format!("the Machine API's answer is not understood: {e}"), json)
                });
            }
            Ok((status, answer)) => return Err(problem(status, &parsed(&answer), json)),
            Err(e) => e,
        };
        // It may have been accepted all the same: the id tells.
        tokio::time::sleep(AGAIN).await;
        if let Ok((200, answer)) = ask(&api, Method::GET, &format!("/v1/upgrades/{id}"), None, ANSWER).await
            && let Ok(seen) = serde_json::from_value(parsed(&answer))
        {
            return Ok(seen);
        }
        if tries == 3 {
            return Err(unknown(id, &e.to_string(), json));
        }
    }
}

fn parsed(body: &[u8]) -> Value {
    let mut value = serde_json::from_slice(body).unwrap_or_default();
    printable_value(&mut value);
    value
}

/// The daemon refused: what it said, and that nothing was accepted.
fn problem(status: u16, problem: &Value, json: bool) -> Exit {
    let (exit, reason) = match (status, text(problem, "type")) {
        (409, "urn:ployz:problem:busy") => (Exit::Busy, "busy"),
        (409, _) => (Exit::Unchanged, "conflict"),
        (403, _) => (Exit::NotPermitted, "not_permitted"),
        (503, "urn:ployz:problem:door-unreachable") => (Exit::Unchanged, "door_unreachable"),
        (503, "urn:ployz:problem:source-unreachable") => (Exit::Unchanged, "source_unreachable"),
        (500.., _) => (Exit::Unknown, "unknown"),
        _ => (Exit::Unchanged, "refused"),
    };
    let help = problem.get("help").and_then(Value::as_array).into_iter().flatten();
    let help: Vec<String> = help.filter_map(Value::as_str).map(str::to_owned).collect();
    refused(exit, reason, text(problem, "detail"), &help, json)
}

fn refused(exit: Exit, reason: &str, what: &str, help: &[String], json: bool) -> Exit {
    if json {
        let first = help.first().cloned().unwrap_or_default();
        super::install::print_refused(reason, &[(what.to_owned(), first)]);
        return exit;
    }
    error(format!("{what}. Nothing was accepted."), None);
    let mut err = output::stderr();
    for line in help {
        let _ = err.help(line);
    }
    exit
}

/// The daemon does not answer: it can't be asked, and root can do without it.
fn silent(host: &Host, selection: Selection, why: &str, json: bool) -> Exit {
    let flags = match selection {
        Selection::Exact(version) => format!("--version {version}"),
        Selection::Channel(channel) => format!("--channel {channel}"),
    };
    let help = [
        format!("do it without the daemon: sudo {} install {flags}", host.installed().display()),
        "to see why: systemctl status ployz.socket ployz.service".to_owned(),
    ];
    refused(Exit::Unknown, "no_daemon", &format!("the daemon does not answer: {why}"), &help, json)
}

fn unknown(id: &str, why: &str, json: bool) -> Exit {
    let what = format!("whether attempt {id} was accepted is not known: {why}");
    let help = format!("look at it: ployzd attempt {id}");
    if json {
        super::install::print_refused("unknown", &[(what, help)]);
    } else {
        error(what, Some(&help));
    }
    Exit::Unknown
}

/// Follows an attempt to its end, over every break of the connection.
async fn follow(host: &Host, mut seen: Seen, mut screen: Screen) -> Exit {
    let id = text(&seen.record, "id").to_owned();
    let (Ok(mut interrupt), Ok(mut hangup)) = (signal(SignalKind::interrupt()), signal(SignalKind::hangup()))
    else {
        error("signals can't be waited for", Some(&format!("look at it: ployzd attempt {id}")));
        return Exit::Unknown;
    };
    let mut revision = String::new();
    let mut quiet_since = Instant::now();
    loop {
        screen.show(&seen);
        if screen.unread {
            return screen.leave(&id);
        }
        if matches!(seen.state, State::Ended | State::Interrupted { .. }) {
            break;
        }
        let next = tokio::select! {
            next = change(host, &id, &revision) => next,
            _ = interrupt.recv() => return screen.leave(&id),
            _ = hangup.recv() => return screen.leave(&id),
        };
        match next {
            Ok((now, at)) => {
                screen.back();
                quiet_since = Instant::now();
                (seen, revision) = (now, at);
                if matches!(seen.state, State::Unknown { .. }) {
                    tokio::time::sleep(AGAIN).await;
                }
            }
            Err(why) => {
                screen.lost();
                // The records are there while the daemon is not; who may read them sees the truth.
                let on_disk = attempt::read(host, |view| records::find(host, &id, view)).ok().flatten();
                if let Some(now) = on_disk
                    && (now.record != seen.record || now.state == State::Running)
                {
                    quiet_since = Instant::now();
                    seen = Seen { state: known_state(now.state, &seen.state), ..now };
                }
                if quiet_since.elapsed() >= PATIENCE {
                    screen.end();
                    return unknown_now(&id, &why, &mut screen);
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
    if matches!(seen.state, State::Interrupted { .. }) {
        // What its unit says of its end comes a moment later.
        tokio::time::sleep(EVIDENCE).await;
        seen = match change(host, &id, "").await {
            Ok((now, _)) => now,
            Err(_) => {
                attempt::read(host, |view| records::find(host, &id, view)).ok().flatten().unwrap_or(seen)
            }
        };
    }
    screen.conclude(&seen);
    exit_of(&seen)
}

/// Who may not see admission knows no more than before.
fn known_state(now: State, before: &State) -> State {
    if matches!(now, State::Unknown { .. }) { before.clone() } else { now }
}

fn unknown_now(id: &str, why: &str, screen: &mut Screen) -> Exit {
    let what = format!(
        "nobody has answered for {} s, and the record has not changed: {why}. What became of attempt {id} is unknown.",
        PATIENCE.as_secs()
    );
    let help = format!("ask as root: sudo /usr/local/bin/ployzd attempt {id}");
    if screen.json {
        super::install::print_refused("unknown", &[(what, help)]);
    } else {
        error(what, Some(&help));
    }
    Exit::Unknown
}

/// The attempt after its next change.
async fn change(host: &Host, id: &str, revision: &str) -> Result<(Seen, String), String> {
    let uri = match revision {
        "" => format!("/v1/upgrades/{id}"),
        seen => format!("/v1/upgrades/{id}?wait={}s&seen={seen}", CHANGE.as_secs()),
    };
    let (status, body) =
        ask(&host.api(), Method::GET, &uri, None, CHANGE + ANSWER).await.map_err(|e| e.to_string())?;
    if status != 200 {
        return Err(format!("the Machine API answered {status}"));
    }
    let value = parsed(&body);
    let revision = text(&value, "revision").to_owned();
    serde_json::from_value(value).map(|seen| (seen, revision)).map_err(|e| e.to_string())
}

/// The screen of one attempt that is followed.
struct Screen {
    out: Output<io::Stdout>,
    json: bool,
    stage: String,
    bytes: u64,
    bar: Option<ProgressBar>,
    lost_at: Option<Timestamp>,
    /// Nobody reads it any more.
    unread: bool,
}

impl Screen {
    fn new(json: bool) -> Self {
        Self {
            out: output::stdout(),
            json,
            stage: String::new(),
            bytes: 0,
            bar: None,
            lost_at: None,
            unread: false,
        }
    }

    fn accepted(&mut self, seen: &Seen) {
        if self.json {
            return;
        }
        let id = text(&seen.record, "id");
        let at = time(&seen.record, "accepted_at").map(millis).unwrap_or_default();
        let _ = self.out.line(format!("attempt {id}  {}  accepted at {at}", attempt::what(&seen.record)));
        let _ =
            self.out.line(format!("it goes on if you leave; come back with: ployzd attempt {id} --follow"));
    }

    /// What is new.
    fn show(&mut self, seen: &Seen) {
        let stage = text(&seen.record, "stage").to_owned();
        let at = time(&seen.record, "updated_at");
        if stage != self.stage {
            self.end();
            self.stage.clone_from(&stage);
            if self.json {
                let id = text(&seen.record, "id");
                let event = json!({
                    "schema": SCHEMA, "event": "stage", "attempt": id, "stage": stage, "fact": null, "at": at,
                });
                self.unread |= self.out.line(event.to_string()).is_err();
            } else {
                self.unread |= self.out.field(&stage, at.map(millis).unwrap_or_default()).is_err();
            }
        }
        if let Some(progress) = seen.progress.filter(|progress| progress.bytes != self.bytes) {
            self.bytes = progress.bytes;
            if self.json {
                let id = text(&seen.record, "id");
                let event = json!({
                    "schema": SCHEMA, "event": "progress", "attempt": id, "bytes": progress.bytes,
                    "total": progress.total, "at": Timestamp::now(),
                });
                let _ = self.out.line(event.to_string());
            } else if io::stdout().is_terminal() {
                self.progress(progress.bytes, progress.total);
            }
        }
    }

    fn progress(&mut self, bytes: u64, total: Option<u64>) {
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(total.unwrap_or(0));
            let style = "  acquiring   {bar:24} {bytes} of {total_bytes}  {bytes_per_sec}";
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏░"));
            }
            bar
        });
        bar.set_position(bytes);
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn lost(&mut self) {
        self.lost_at.get_or_insert_with(Timestamp::now);
    }

    fn back(&mut self) {
        let Some(lost) = self.lost_at.take() else { return };
        let now = Timestamp::now();
        if !self.json {
            let _ = self.out.line(format!("  connection lost {}, back {}", millis(lost), millis(now)));
        }
    }

    /// The person leaves; the attempt does not.
    fn leave(&mut self, id: &str) -> Exit {
        self.end();
        if self.json {
            let event = json!({
                "schema": SCHEMA, "event": "outcome", "at": Timestamp::now(), "record": null,
                "left": {"attempt": id},
            });
            let _ = self.out.line(event.to_string());
        } else {
            let mut err = output::stderr();
            let _ = err.line(format!("attempt {id} goes on; its outcome is not known here"));
            let _ = err.help(&format!("come back with: ployzd attempt {id} --follow"));
        }
        Exit::Unknown
    }

    fn conclude(&mut self, seen: &Seen) {
        self.end();
        let record = &seen.record;
        if self.json {
            let _ = self.out.line(outcome_event(seen));
            return;
        }
        let Some(("succeeded", detail)) = outcome(record).filter(|_| seen.state == State::Ended) else {
            let _ = attempt::show(&mut self.out, seen);
            return;
        };
        let took = time(record, "accepted_at").zip(time(record, "ended_at"));
        let took = took.map(|(from, to)| {
            let millis = to.duration_since(from).as_millis();
            format!(" in {}.{} s", millis / 1000, millis % 1000 / 100)
        });
        let pid = detail.get("pid").and_then(Value::as_u64).unwrap_or_default();
        let _ = self.out.line(format!(
            "succeeded{}: {} is running (pid {pid}), digest {}",
            took.unwrap_or_default(),
            text(detail, "version"),
            short(text(detail, "sha256"))
        ));
        let notes = record.get("warnings").and_then(Value::as_array).into_iter().flatten();
        for note in notes.filter_map(Value::as_str) {
            let _ = self.out.line(format!("note: {note}"));
        }
    }
}

/// "12:01:09.114"
fn millis(at: Timestamp) -> String {
    at.to_zoned(TimeZone::system()).strftime("%H:%M:%S%.3f").to_string()
}
