//! An installation ended, or troubled, at one call: what strace saw of its calls, and what was found after them.
//!
//! `crash/inside.sh` carries out one trial inside of a machine; `crash/pipeline.sh` is what it is compared with.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::machine::Machine;
use crate::releases::Release;

/// Where everything about trials is, inside.
const HERE: &str = "/root/crash";
/// A write of so many bytes is one of many that move a file's content.
const BULK: u64 = 4096;

/// One call by which a process changes files, as strace wrote it down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `rename`, …
    pub name: String,
    /// Which one of this name it is, from 1: what strace counts.
    pub nth: usize,
    /// Its name and its paths, without what differs each time.
    pub what: String,
    /// Which one of the same `what` it is, from 1.
    pub again: usize,
    /// What it returned; none when it did not return.
    pub returned: Option<i64>,
}

/// Everything that a machine showed at one moment: facts by name, each with its values in order.
#[derive(Debug, Clone, Default)]
pub struct Seen(BTreeMap<String, Vec<String>>);

/// One trial.
#[derive(Debug)]
pub struct Trial {
    /// The call at which it was disturbed; none when it never came to it.
    pub at: Option<String>,
    /// What was found after it.
    pub cut: Seen,
    /// What was found after the same installation was run again.
    pub again: Seen,
}

impl Call {
    /// How it is told: `fsync /usr/local/bin (2)`.
    pub fn shown(&self) -> String {
        format!("{} ({})", self.what, self.again)
    }

    /// Whether it changes files at all: not what goes to pipes and sockets, nor what failed.
    pub fn changes(&self) -> bool {
        self.what.contains('/')
            && !self.what.contains("/crash/")
            && !self.what.contains("/dev/")
            && self.returned.is_some_and(|returned| returned >= 0)
    }

    /// What strace is told, to do this to it: `signal=KILL`, `error=EIO`.
    pub fn inject(&self, what: &str) -> String {
        format!("{}:{what}:when={}", self.name, self.nth)
    }
}

/// The calls in a log of strace, without those that only open or read.
pub fn calls(log: &str) -> Vec<Call> {
    let (mut names, mut whats) = (BTreeMap::new(), BTreeMap::new());
    let mut calls = Vec::new();
    for line in log.lines() {
        let Some((name, rest)) = line.split_once('(').filter(|(name, _)| is_name(name)) else { continue };
        let (arguments, end) = rest.rsplit_once(" = ").unwrap_or((rest, "?"));
        let nth = names.entry(name.to_owned()).or_insert(0usize);
        *nth += 1;
        if opens(name) && !arguments.contains("O_CREAT") {
            continue;
        }
        let mut what = name.to_owned();
        for path in paths(arguments) {
            what = format!("{what} {}", lasting(&path));
        }
        let again = whats.entry(what.clone()).or_insert(0usize);
        *again += 1;
        let returned = end.split([' ', '<']).next().and_then(|number| number.parse().ok());
        calls.push(Call { name: name.to_owned(), nth: *nth, what, again: *again, returned });
    }
    calls
}

fn opens(name: &str) -> bool {
    matches!(name, "open" | "openat")
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// The paths among a call's arguments: strings, and what file descriptors stand for.
fn paths(arguments: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut here = "";
    let mut rest = arguments;
    while let Some(at) = rest.find(['"', '<']) {
        let close = if rest[at..].starts_with('"') { '"' } else { '>' };
        let Some(length) = rest[at + 1..].find(close) else { break };
        let path = &rest[at + 1..at + 1 + length];
        if rest[..at].ends_with("AT_FDCWD") {
            here = path;
        } else if close == '"' && !path.starts_with('/') && !here.is_empty() && !path.is_empty() {
            found.push(format!("{here}/{path}"));
        } else if !path.is_empty() {
            found.push(path.to_owned());
        }
        rest = &rest[at + length + 2..];
    }
    found
}

/// A path without ids and random parts.
fn lasting(path: &str) -> String {
    let parts = path.split('/').map(|part| {
        if part.starts_with("tmp.") {
            return "tmp.…".to_owned();
        }
        let words: Vec<&str> = part.split('.').map(|word| if is_random(word) { "…" } else { word }).collect();
        words.join(".")
    });
    let path: Vec<String> = parts.collect();
    path.join("/")
}

fn is_random(word: &str) -> bool {
    let hex = word.len() >= 8 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let number = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    hex || number
}

/// Each call that changes files once, but for those that make an empty one, which is written to next; of those that
/// move content, some of each file: the first, the last, and between.
pub fn each(calls: &[Call], bulk: usize) -> Vec<Call> {
    let moves = |call: &Call| matches!(call.name.as_str(), "write" | "pwrite64");
    let big = |call: &Call| call.returned.is_some_and(|n| u64::try_from(n).is_ok_and(|n| n >= BULK));
    let mut content: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
    for call in calls.iter().filter(|call| moves(call) && big(call)) {
        content.entry(&call.what).or_default();
    }
    let mut chosen = Vec::new();
    for call in calls.iter().filter(|call| call.changes() && !opens(&call.name)) {
        match content.get_mut(call.what.as_str()) {
            Some(all) => all.push(call),
            None => chosen.push(call.clone()),
        }
    }
    for all in content.values() {
        chosen.extend(spread(all, bulk).into_iter().cloned().cloned());
    }
    chosen
}

/// So many of all, evenly, the first and the last among them.
pub fn spread<T>(all: &[T], many: usize) -> Vec<&T> {
    if all.len() <= many {
        return all.iter().collect();
    }
    (0..many).map(|n| &all[n * (all.len() - 1) / (many - 1).max(1)]).collect()
}

impl Seen {
    fn read(lines: &str) -> Self {
        let mut facts: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in lines.lines().filter_map(|line| line.split_once('\t')) {
            facts.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        Self(facts)
    }

    /// All values of a fact.
    pub fn all(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The first value of a fact; nothing when there is none.
    pub fn one(&self, name: &str) -> &str {
        self.all(name).first().map_or("", String::as_str)
    }

    /// It as JSON; null when it is not.
    pub fn json(&self, name: &str) -> Value {
        serde_json::from_str(self.one(name)).unwrap_or_default()
    }

    /// The records of attempts that this scenario made.
    pub fn records(&self) -> Vec<Value> {
        self.all("record").iter().filter_map(|text| serde_json::from_str(text).ok()).collect()
    }

    /// The record in the last thing that an installer told.
    pub fn told(&self) -> Value {
        self.json("out")["record"].clone()
    }
}

impl Machine {
    /// Makes this machine, as it is now, the beginning of trials that install a release.
    #[track_caller]
    pub fn begin_trials(&self, release: &Release) {
        let from = self.deliver(release);
        self.write(&format!("{HERE}/from"), &from);
        self.write(&format!("{HERE}/new"), &format!("/root/{}-{}", release.version, &release.sha256[..8]));
        self.write(&format!("{HERE}/inside.sh"), include_str!("crash/inside.sh"));
        self.write(&format!("{HERE}/pipeline.sh"), include_str!("crash/pipeline.sh"));
        self.run(&format!("bash {HERE}/inside.sh keep")).ok();
    }

    /// How it is now.
    #[track_caller]
    pub fn seen(&self) -> Seen {
        Seen::read(&self.run(&format!("bash {HERE}/inside.sh look")).expect(0).stdout)
    }

    /// The calls of an installation that nothing disturbs, and what is found after it. `what` is `ployzd`, or the
    /// command of the shell pipeline that is watched.
    #[track_caller]
    pub fn record_calls(&self, what: &str) -> (Vec<Call>, Seen) {
        let seen = Seen::read(&self.run(&format!("bash {HERE}/inside.sh record {what}")).stdout);
        assert_eq!(seen.one("exit"), "0", "the installation that nothing disturbs: {seen:?}");
        (calls(&self.read(&format!("{HERE}/trace"))), seen)
    }

    /// One trial: what is injected is strace's word for it, as [`Call::inject`] makes it; with a second one, that is
    /// injected into an installation before.
    #[track_caller]
    pub fn trial(&self, what: &str, injections: &[String]) -> Trial {
        let run = self.run(&format!("bash {HERE}/inside.sh trial {what} {}", injections.join(" ")));
        let (cut, again) =
            run.stdout.split_once("again\t\n").unwrap_or_else(|| panic!("half a trial:\n{}", run.shown()));
        let cut = Seen::read(cut);
        let at = calls(cut.one("at")).pop().map(|call| call.what);
        Trial { at, cut, again: Seen::read(again) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_by_what_stays_the_same() {
        let log = r#"openat(AT_FDCWD</>, "/etc/passwd", O_RDONLY) = 3</etc/passwd>
openat(AT_FDCWD</>, "/a/.b.json.0123456789ab", O_RDWR|O_CREAT, 0600) = 6</a/.b.json.0123456789ab>
write(6</a/.b.json.0123456789ab>, ""..., 114) = 114
--- SIGCHLD {si_signo=SIGCHLD, si_pid=272} ---
write(7<anon_inode:[eventfd]>, ""..., 8) = 8
rename("/a/.b.json.0123456789ab", "/a/b.json") = 0
fchmodat(AT_FDCWD</a/tmp.Xy1>, "b", 0755) = 0
unlinkat(7</l/self/269.a763a6fe>, "ployzd", 0) = -1 ENOENT (No such file or directory)
fsync(6</a>) = ?
+++ killed by SIGKILL +++"#;
        let calls = calls(log);
        let shown: Vec<String> = calls.iter().map(|call| format!("{} {}", call.nth, call.shown())).collect();
        assert_eq!(
            shown,
            [
                "2 openat /a/.b.json.… (1)",
                "1 write /a/.b.json.… (1)",
                "2 write anon_inode:[eventfd] (1)",
                "1 rename /a/.b.json.… /a/b.json (1)",
                "1 fchmodat /a/tmp.…/b (1)",
                "1 unlinkat /l/self/….… ployzd (1)",
                "1 fsync /a (1)",
            ]
        );
        assert_eq!(calls.last().map(|call| call.returned), Some(None));
        let chosen: Vec<&str> = calls.iter().filter(|call| call.changes()).map(|c| c.name.as_str()).collect();
        assert_eq!(chosen, ["openat", "write", "rename", "fchmodat"]);
        assert_eq!(spread(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 3), [&0, &4, &8]);
    }
}
