//! An installation that is killed, or whose disk fails, at each call by which it changes anything; and the same done to
//! a careful shell pipeline, side by side.
//!
//! A kill before a call leaves what the calls before it did: killed at each, every state in between was looked at.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use scenarios::crash::{Call, Seen, each, spread};
use scenarios::{Machine, Release, note, release, release_padded};
#[path = "crash_matrix/judge.rs"]
mod judge;

/// Machines that carry out trials at once.
const MACHINES: usize = 2;
/// How many of the writes that move the content of one file are disturbed.
const BULK: usize = 5;
/// How many calls fail with an error, at most.
const ERRORS: usize = 90;
/// How many are killed twice.
const TWICE: usize = 40;
/// The commands of the shell pipeline that change anything.
const COMMANDS: [&str; 6] = ["mktemp", "curl", "tar", "chmod", "mv", "rm"];

/// What is wrong after a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    /// A file is neither the old nor the new one, or the daemon does not serve.
    Torn,
    /// Success was told, and it is not so.
    FalseSuccess,
    /// Something else was told that is not so.
    Lie,
    /// The same installation again did not bring it to where it should be.
    Hands,
    /// Something is left after that.
    Left,
}

/// What was done to one call.
#[derive(Debug, Clone)]
struct Act {
    /// `ployzd`, or the command of the pipeline.
    of: &'static str,
    call: Call,
    /// `signal=KILL`, `error=EIO`.
    injection: &'static str,
    /// The call at which an installation was killed before.
    earlier: Option<Call>,
}

/// What came of it.
struct Outcome {
    act: Act,
    /// It came to another call than the one that was meant.
    missed: bool,
    /// How the installation ended.
    exit: String,
    wrong: Vec<(Wrong, String)>,
}

/// A machine, and what is the same in all its trials.
struct Bench {
    machine: Machine,
    old: Release,
    new: Release,
    older: Release,
    /// Before the installation, and after one that nothing disturbed.
    before: Seen,
    done: Seen,
}

#[test]
fn killed_at_any_call_it_leaves_a_whole_release_and_the_truth_and_the_next_run_needs_no_hands() {
    let matrix = Matrix::prepared("kill");
    let ours = matrix.acts(&["ployzd"], |calls| each(calls, BULK), |_, _| "signal=KILL");
    let shell = matrix.acts(&COMMANDS, |calls| each(calls, BULK), |_, _| "signal=KILL");
    let (ours, shell) = (matrix.carry_out(ours), matrix.carry_out(shell));
    matrix.conclude("killed", &ours, &shell);
}

#[test]
fn a_disk_that_is_full_or_fails_at_any_call_is_told_as_what_it_is() {
    let matrix = Matrix::prepared("errors");
    let ours = matrix.acts(&["ployzd"], some_of_each_kind, which_error);
    let shell = matrix.acts(&COMMANDS, some_of_each_kind, which_error);
    let (ours, shell) = (matrix.carry_out(ours), matrix.carry_out(shell));
    matrix.conclude("disk errors", &ours, &shell);
}

#[test]
fn killed_again_in_the_repair_of_a_kill_it_is_repaired_by_the_next_run() {
    let matrix = Matrix::prepared("twice");
    let ours = matrix.acts(&["ployzd"], |calls| each(calls, BULK), |_, _| "signal=KILL");
    let half = ours.len() / 2;
    // Pairs of calls, near to each other and far apart.
    let pairs = ours.iter().enumerate().map(|(n, act)| {
        let earlier = ours[(n + half / (1 + n % 5)) % ours.len()].call.clone();
        Act { earlier: Some(earlier), ..act.clone() }
    });
    let pairs: Vec<Act> = pairs.collect();
    let pairs = spread(&pairs, TWICE).into_iter().cloned().collect();
    matrix.conclude("killed twice", &matrix.at_once(pairs), &[]);
}

/// The first and the last call of each kind, with those that make a file.
fn some_of_each_kind(calls: &[Call]) -> Vec<Call> {
    let mut chosen: Vec<Call> = Vec::new();
    let candidates: Vec<&Call> = calls.iter().filter(|call| call.changes()).collect();
    for call in &candidates {
        let last = candidates.iter().rfind(|other| other.what == call.what).unwrap();
        if call.again == 1 || call == last {
            chosen.push((*call).clone());
        }
    }
    spread(&chosen, ERRORS).into_iter().cloned().collect()
}

/// A full disk where something is made or written first, a failing one otherwise.
fn which_error(n: usize, call: &Call) -> &'static str {
    match call.name.as_str() {
        "fsync" | "fdatasync" | "unlink" | "unlinkat" | "rmdir" | "ftruncate" => "error=EIO",
        _ if n % 3 == 2 => "error=EIO",
        _ => "error=ENOSPC",
    }
}

/// Machines that are ready for trials.
struct Matrix {
    benches: Vec<Bench>,
    started: Instant,
}

/// Makes the old release differ from the new one in a unit and in its account declarations, and makes as many records
/// as are kept.
const SEED: &str = r#"
    set -e
    echo '# another line' >>/usr/local/lib/systemd/system/ployz.service
    echo '# another line' >>/usr/local/lib/sysusers.d/ployz.conf
    cd /var/lib/ployz-install/attempts
    last=$(ls -t | head -n 1)
    for n in $(seq 10 39); do
        id=0000$n$(echo $last | cut -c7-32) at=2026-01-01T00:00:${n}Z
        jq --arg id $id --arg at $at '.id = $id | .sequence = 0 | .accepted_at = $at' $last >$id.json
    done
    systemctl daemon-reload
    systemctl restart ployz.service"#;

impl Bench {
    /// The old release, confirmed and initialized.
    fn prepared(name: &str) -> Self {
        let (older, old, new) = (release_padded("1.4.0", 1), release("1.4.0"), release("1.5.0"));
        let machine = Machine::named(name).setting("confirm_window", 0.into()).boot();
        machine.install(&older).ok();
        machine.install(&old).ok();
        machine.run("/usr/local/bin/ployzd machine initialize").ok();
        machine.run(SEED).ok();
        machine.begin_trials(&new);
        let before = machine.seen();
        assert_eq!((before.one("code"), before.one("count")), ("0", "32"), "{before:?}");
        let (_, done) = machine.record_calls("ployzd");
        Self { machine, old, new, older, before, done }
    }
}

impl Matrix {
    fn prepared(name: &str) -> Self {
        let started = Instant::now();
        let benches = (1..=MACHINES).map(|n| Bench::prepared(&format!("crash-{name}-{n}"))).collect();
        note(&format!("crash matrix ({name}): prepared after {:.0} s", started.elapsed().as_secs_f32()));
        Self { benches, started }
    }

    /// What is to be done: to the calls that are chosen from those of each command.
    fn acts(
        &self,
        commands: &[&'static str],
        choose: impl Fn(&[Call]) -> Vec<Call>,
        injection: impl Fn(usize, &Call) -> &'static str,
    ) -> Vec<Act> {
        let mut acts = Vec::new();
        for of in commands {
            let (calls, _) = self.benches[0].machine.record_calls(of);
            let act =
                |(n, call): (usize, Call)| Act { of, injection: injection(n, &call), call, earlier: None };
            acts.extend(choose(&calls).into_iter().enumerate().map(act));
        }
        acts
    }

    /// Carries them out; once more those that came to another call. Those that never came to theirs stay missed.
    fn carry_out(&self, acts: Vec<Act>) -> Vec<Outcome> {
        let first = self.at_once(acts);
        let again = first.iter().filter(|result| result.missed).map(|result| result.act.clone()).collect();
        let (missed, mut results): (Vec<_>, Vec<_>) = first.into_iter().partition(|result| result.missed);
        results.extend(self.at_once(again));
        // What was wrong after another call is wrong all the same.
        results.extend(missed.into_iter().filter(|result| !result.wrong.is_empty()));
        results
    }

    fn at_once(&self, acts: Vec<Act>) -> Vec<Outcome> {
        let (acts, results) = (Mutex::new(acts.into_iter()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for bench in &self.benches {
                scope.spawn(|| {
                    while let Some(act) = { acts.lock().unwrap().next() } {
                        let client = bench.machine.client();
                        let trial = bench.machine.trial(act.of, &act.injections());
                        let heard = client.stop();
                        let mut result = bench.judge(act, &trial);
                        if result.act.of == "ployzd" && !heard.failures.is_empty() {
                            result
                                .wrong
                                .push((Wrong::Torn, format!("requests failed: {:?}", heard.failures)));
                        }
                        results.lock().unwrap().push(result);
                    }
                });
            }
        });
        results.into_inner().unwrap()
    }

    /// Shows both side by side, names everything that is wrong with ours, and fails if anything is.
    fn conclude(&self, how: &str, ours: &[Outcome], shell: &[Outcome]) {
        let took = self.started.elapsed().as_secs_f32();
        let mut rows = vec![HEAD.to_owned(), row(how, "ployzd install", ours)];
        if !shell.is_empty() {
            rows.push(row(how, "curl|sha256sum|tar|mv", shell));
        }
        note(&format!("crash matrix: after {took:.0} s\n{}", rows.join("\n")));
        let codes = counts(ours.iter().map(|result| result.exit.as_str()));
        let calls = counts(ours.iter().map(|result| result.act.call.name.as_str()));
        note(&format!("ployzd install, {how}: exit codes {codes:?}, calls {calls:?}"));
        for result in ours {
            if result.exit == "0" && result.act.earlier.is_none() {
                note(&format!("  {}: it went on, and 1.5.0 runs", result.act.shown()));
            }
            for (wrong, text) in &result.wrong {
                note(&format!("  {}, exit {}: {wrong:?}: {text}", result.act.shown(), result.exit));
            }
            if result.missed {
                note(&format!("  {}: it never came to this call", result.act.shown()));
            }
        }
        let wrong: usize = ours.iter().map(|result| result.wrong.len()).sum();
        assert_eq!(wrong, 0, "see above");
        let missed = ours.iter().filter(|result| result.missed).count();
        assert!(missed * 20 < ours.len(), "{missed} of {} trials never came to their call", ours.len());
        let control = shell.is_empty() || shell.iter().any(|result| result.has(Wrong::Torn));
        assert!(control, "the control broke nothing, so this shows nothing");
    }
}

const HEAD: &str = "                                         trials   whole    torn   false success   untrue   \
                    rerun needs hands   left after rerun";

fn row(how: &str, what: &str, results: &[Outcome]) -> String {
    let hits: Vec<&Outcome> = results.iter().filter(|result| !result.missed).collect();
    let with = |wrong| hits.iter().filter(|result| result.has(wrong)).count();
    let torn = with(Wrong::Torn);
    format!(
        "  {:<38} {:>6} {:>7} {torn:>7} {:>15} {:>8} {:>19} {:>18}",
        format!("{what}, {how}"),
        hits.len(),
        hits.len() - torn,
        with(Wrong::FalseSuccess),
        with(Wrong::Lie),
        with(Wrong::Hands),
        with(Wrong::Left)
    )
}

/// How many of each there are.
fn counts<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, usize> {
    names.fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name).or_default() += 1;
        counts
    })
}

impl Act {
    /// What strace is told.
    fn injections(&self) -> Vec<String> {
        let earlier = self.earlier.iter().map(|call| call.inject("signal=KILL"));
        std::iter::once(self.call.inject(self.injection)).chain(earlier).collect()
    }

    fn shown(&self) -> String {
        let earlier = self.earlier.iter().map(|call| format!(", after a kill at {}", call.shown()));
        format!("{} {} {}{}", self.of, self.injection, self.call.shown(), earlier.collect::<String>())
    }
}

impl Outcome {
    fn has(&self, wrong: Wrong) -> bool {
        self.wrong.iter().any(|(kind, _)| *kind == wrong)
    }
}
