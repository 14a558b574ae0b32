//! A command that ended, and every command bounded in time.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Bound of a command of which nothing else is said.
pub(crate) const USUAL: Duration = Duration::from_secs(90);

/// A command that ended.
#[derive(Debug, Clone)]
pub struct Run {
    /// What was run.
    pub command: String,
    /// Its exit code; 124 when its time was up, 137 when it was killed.
    pub code: i32,
    /// What it wrote.
    pub stdout: String,
    /// What it wrote of its troubles.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

impl Run {
    pub(crate) fn new(command: String, output: &Output, took: Duration) -> Self {
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { command, code, stdout: text(&output.stdout), stderr: text(&output.stderr), took }
    }

    /// Itself, if it ended with this code.
    #[track_caller]
    #[must_use = "or `.ok()`, where only the code matters"]
    pub fn expect(self, code: i32) -> Self {
        assert!(self.code == code, "expected exit code {code}:\n{}", self.shown());
        self
    }

    /// Fails unless it ended well.
    #[track_caller]
    pub fn ok(self) {
        let _ = self.expect(0);
    }

    /// Its standard output, without white space around it.
    pub fn text(&self) -> &str {
        self.stdout.trim()
    }

    /// Both outputs.
    pub fn both(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Fails unless each text is in one of its outputs.
    #[track_caller]
    #[must_use = "or drop it with `let _ =`"]
    pub fn says(self, texts: &[&str]) -> Self {
        let both = self.both();
        for text in texts {
            assert!(both.contains(text), "{text:?} is missing:\n{}", self.shown());
        }
        self
    }

    /// Its standard output as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(self.text()).unwrap_or_else(|e| panic!("not JSON ({e}):\n{}", self.shown()))
    }

    /// Its standard output as JSON, one value a line.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        let parse = |line| {
            serde_json::from_str(line)
                .unwrap_or_else(|e| panic!("{line:?} is not JSON ({e}):\n{}", self.shown()))
        };
        self.text().lines().map(parse).collect()
    }

    /// The last event of `ployzd install --json`, which must be its outcome.
    #[track_caller]
    pub fn last(&self) -> Value {
        let last = self.events().pop().unwrap_or_default();
        assert_eq!(last["event"], "outcome", "the last event is not the outcome:\n{}", self.shown());
        last
    }

    /// The record in the last event.
    #[track_caller]
    pub fn record(&self) -> Value {
        let record = self.last()["record"].clone();
        assert!(record.is_object(), "there is no record:\n{}", self.shown());
        record
    }

    /// The outcome in that record.
    #[track_caller]
    pub fn outcome(&self) -> Value {
        self.record()["outcome"].clone()
    }

    /// All of it, for a failure's message.
    pub fn shown(&self) -> String {
        format!(
            "  $ {}\n  ended with code {} after {:.1} s\n--- stdout\n{}\n--- stderr\n{}\n---",
            self.command,
            self.code,
            self.took.as_secs_f32(),
            self.stdout.trim_end(),
            self.stderr.trim_end()
        )
    }
}

/// Runs a command on this host, within the usual bound.
#[track_caller]
pub fn host<S: AsRef<OsStr>>(words: &[S]) -> Run {
    host_within(USUAL, words)
}

/// Runs a command on this host, ended when its time is up.
#[track_caller]
pub fn host_within<S: AsRef<OsStr>>(bound: Duration, words: &[S]) -> Run {
    let started = Instant::now();
    let output = bounded(bound, words).output().unwrap_or_else(|e| panic!("starting {}: {e}", shown(words)));
    Run::new(shown(words), &output, started.elapsed())
}

/// A command of this host, not started yet, that `timeout` ends with all that it started.
pub(crate) fn bounded<S: AsRef<OsStr>>(bound: Duration, words: &[S]) -> Command {
    let mut command = Command::new("timeout");
    command.arg("--kill-after=5").arg(format!("{:.1}", bound.as_secs_f32())).args(words);
    command.stdin(Stdio::null());
    command
}

pub(crate) fn shown<S: AsRef<OsStr>>(words: &[S]) -> String {
    words.iter().map(|word| word.as_ref().to_string_lossy()).collect::<Vec<_>>().join(" ")
}
