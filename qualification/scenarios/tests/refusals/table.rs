//! A row of the table: a fault, what is said of it, and what must be the same after it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use scenarios::{Machine, Run, Server, release};
use serde_json::{Value, json};

pub(crate) const PLOYZD: &str = "/usr/local/bin/ployzd";
pub(crate) const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.5.0 --json";

/// Where a row ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    /// Before acceptance: there is no record.
    Nothing,
    /// At this stage of an attempt, whose record says so.
    Stage(&'static str),
}

pub(crate) const ACQUIRING: At = At::Stage("acquiring");
pub(crate) const VERIFYING: At = At::Stage("verifying");
pub(crate) const PREFLIGHT: At = At::Stage("preflight");

/// All rows so far, on one Machine.
pub(crate) struct Table<'a> {
    pub(crate) machine: &'a Machine,
    pub(crate) server: &'a Server,
    lines: Vec<String>,
    faults: Vec<String>,
    /// By whom each text was seen.
    seen: BTreeMap<String, String>,
}

impl<'a> Table<'a> {
    pub(crate) fn new(machine: &'a Machine, server: &'a Server) -> Self {
        Self { machine, server, lines: Vec::new(), faults: Vec::new(), seen: BTreeMap::new() }
    }

    /// A row against a source that misbehaves by one rule.
    pub(crate) fn source(&mut self, name: &str, rule: &Value, at: At, says: &str, within: u64) {
        self.server.rules(&json!([rule]));
        self.refused(name, UPGRADE, at, says, within);
        self.server.obey();
    }

    /// A row against a host that is prepared, and put right again, by these commands.
    pub(crate) fn host(&mut self, name: &str, fault: [&str; 2], at: At, says: &str, within: u64) {
        self.machine.run(&format!("set -e; {}", fault[0])).ok();
        self.refused(name, UPGRADE, at, says, within);
        self.machine.run(&format!("set -e; {}", fault[1])).ok();
    }

    /// A row: this command is refused there, says this within so many seconds, and nothing is touched.
    pub(crate) fn refused(&mut self, name: &str, command: &str, at: At, says: &str, within: u64) {
        let text = self.also(name, command, at, says, within);
        if let Some(other) = self.seen.insert(text.clone(), name.to_owned()) {
            self.faults.push(format!("{name}: its text is that of {other:?}: {text}"));
        }
    }

    /// The same where the text may be that of another row, since what is observed is the same. Returns it.
    pub(crate) fn also(&mut self, name: &str, command: &str, at: At, says: &str, within: u64) -> String {
        let machine = self.machine;
        let (before, attempts) = (machine.watch(), machine.attempts());
        let run = machine.run_within(60, command);
        let observed = observe(&run);
        let mut faults = Vec::new();
        if run.code != 4 {
            faults.push(format!("exit {}", run.code));
        }
        if observed.at != name_of(at) {
            faults.push(format!("it ended at {:?}, not {:?}", observed.at, name_of(at)));
        }
        if !observed.text.contains(says) {
            faults.push(format!("it does not say {says:?}"));
        }
        if observed.text.contains(|c: char| c.is_control()) {
            faults.push("its text holds control characters".into());
        }
        if run.took.as_secs() >= within {
            faults.push(format!("it took {:.1} s, not less than {within}", run.took.as_secs_f32()));
        }
        let accepted = machine.attempts().iter().filter(|id| !attempts.contains(id)).count();
        if accepted != usize::from(at != At::Nothing) {
            faults.push(format!("it left {accepted} records"));
        }
        if at != At::Nothing && observed.installation != "unchanged" {
            faults.push(format!("the record says that the installation is {:?}", observed.installation));
        }
        let later = machine.watch();
        let (same, clean) = (|| before.assert_same(&later), || machine.assert_nothing_left());
        let looks: [&dyn Fn(); 2] = [&same, &clean];
        for look in looks {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(look)) {
                faults.push(panic.downcast_ref::<String>().cloned().unwrap_or_default());
            }
        }
        let took = run.took.as_secs_f32();
        let line =
            format!("{name:<44} | {} | {:<9} | {took:>4.1} s | {}", run.code, observed.at, observed.text);
        eprintln!("{line}{}", if faults.is_empty() { "" } else { "   <- WRONG" });
        if !faults.is_empty() {
            self.faults.push(format!("{line}\n    {}\n{}", faults.join("\n    "), run.shown()));
        }
        self.lines.push(line);
        observed.text
    }

    /// Shows all of it.
    pub(crate) fn print(&self) {
        eprintln!("{:<44} | exit | stage (- : no record) | took | observed", "row");
        eprintln!("{}\n{} rows", self.lines.join("\n"), self.lines.len());
    }

    /// Fails when any row was wrong, or rows are missing.
    pub(crate) fn assert_good(&self, least: usize) {
        let (wrong, all) = (self.faults.len(), self.lines.len());
        assert!(self.faults.is_empty(), "{wrong} of {all} rows are wrong:\n{}", self.faults.join("\n"));
        assert!(all >= least, "there are only {all} rows");
    }

    /// Publishes this executable, or whatever it is, as the archive of 1.5.0.
    pub(crate) fn publish(&self, archive: &[u8]) {
        let dir = scenarios::scratch().join("hostile");
        std::fs::create_dir_all(&dir).unwrap();
        let name = kit::release::archive_name();
        std::fs::write(dir.join(&name), archive).unwrap();
        let sums = format!("{}  {name}\n", kit::release::sha256(archive));
        std::fs::write(dir.join("checksums.txt"), sums).unwrap();
        self.server.publish(&scenarios::Release { dir, ..release("1.5.0") });
    }

    /// Publishes the good 1.5.0 again.
    pub(crate) fn publish_good(&self) {
        self.server.publish(&release("1.5.0"));
    }
}

/// Deadlines of a Machine that is to succeed.
pub(crate) fn deadline_for_good(machine: &Machine) {
    machine
        .run("jq 'del(.deadlines)' /etc/ployz/install.json >/tmp/i && cat /tmp/i >/etc/ployz/install.json")
        .ok();
}

/// What a run has told.
struct Observed {
    text: String,
    at: String,
    installation: String,
}

fn observe(run: &Run) -> Observed {
    let last = run.stdout.lines().last().unwrap_or_default();
    let last: Value = serde_json::from_str(last).unwrap_or_default();
    let words = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let record = &last["record"];
    if record.is_object() {
        let failed = &record["outcome"]["failed"];
        let causes = failed["causes"].as_array().into_iter().flatten();
        let texts: Vec<String> = std::iter::once(&failed["error"]).chain(causes).map(words).collect();
        let id = words(&record["id"]);
        // What differs from run to run is no difference between two rows.
        let text = without_counts(&texts.join("; ").replace(&id, "ID"));
        return Observed { text, at: words(&failed["stage"]), installation: words(&record["installation"]) };
    }
    let problems = last["refused"]["problems"].as_array().into_iter().flatten();
    let texts: Vec<String> = problems.map(|problem| words(&problem["what"])).collect();
    let text = without_counts(&texts.join("; "));
    Observed { text, at: "-".into(), installation: "unchanged".into() }
}

/// Without ", after 4 tries in 3 s".
fn without_counts(text: &str) -> String {
    match text.rsplit_once(", after ") {
        Some((before, counts)) if counts.contains(" tries in ") => before.to_owned(),
        _ => text.to_owned(),
    }
}

fn name_of(at: At) -> &'static str {
    match at {
        At::Nothing => "-",
        At::Stage(name) => name,
    }
}
