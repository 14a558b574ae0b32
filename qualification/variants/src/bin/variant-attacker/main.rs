//! A program that does what an untrusted one might, and says what worked.
//!
//! As `ployzd` of a release it is run before it is trusted (`version --json`): it tries everything, leaves a process
//! behind, and fails, so that what it says comes back as the reason of the refusal: a line a thing that worked, and how
//! many it tried. `variant-attacker on PID` tries to get at another process, and says how each try ended.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it reports to whoever runs it")]

mod files;
mod processes;
mod rights;

use std::process::ExitCode;

use nix::sys::signal::{SigSet, Signal};

/// What was tried, and what worked.
#[derive(Debug, Default)]
struct Report {
    tried: usize,
    worked: Vec<String>,
}

impl Report {
    /// Notes how a try ended: with what there is to say of its success, or not.
    fn note<E>(&mut self, what: &str, tried: Result<String, E>) {
        self.tried += 1;
        if let Ok(how) = tried {
            self.worked.push(format!("{what} {how}").trim_end().to_owned());
        }
    }
}

fn main() -> ExitCode {
    // A write beyond the limit of files is to be an error, and not the end.
    let mut beyond = SigSet::empty();
    beyond.add(Signal::SIGXFSZ);
    let _ = beyond.thread_block();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["version" | "units", ..] => everything(),
        ["on", pid] => return processes::on(pid),
        ["linger", generation] => return processes::linger(generation),
        _ => return ExitCode::from(2),
    }
    ExitCode::from(9)
}

/// Everything, as the binary of a release.
fn everything() {
    let mut report = Report::default();
    rights::gain(&mut report);
    files::write(&mut report);
    files::read(&mut report);
    processes::reach_out(&mut report);
    processes::stay_behind(&mut report);
    // Last, since it changes what this process is.
    rights::namespaces(&mut report);
    for line in &report.worked {
        eprintln!("worked: {line};");
    }
    eprintln!("{} things tried, {} worked", report.tried, report.worked.len());
}
