//! What was found after a trial, compared with what may be there and with what was told of it. Works on facts alone.

use scenarios::crash::{Seen, Trial};
use serde_json::Value;

use super::{Act, Bench, Outcome, Wrong};

/// What is found wrong, as it is found.
struct Findings(Vec<(Wrong, String)>);

impl Findings {
    fn unless(&mut self, good: bool, wrong: Wrong, text: impl Into<String>) {
        if !good {
            self.0.push((wrong, text.into()));
        }
    }
}

impl Bench {
    pub(super) fn judge(&self, act: Act, trial: &Trial) -> Outcome {
        let mut findings = Findings(Vec::new());
        let exit = trial.cut.one("exit").to_owned();
        let killed = act.injection == "signal=KILL";
        let missed = trial.at.as_deref() != Some(act.call.what.as_str()) || (killed && exit != "137");
        // A repair has other calls than what it repairs: it is killed somewhere, or not at all.
        let missed = missed && act.earlier.is_none();
        let hit = trial.at.as_deref().unwrap_or(&act.call.what);
        self.executable(&mut findings, &trial.cut);
        let there = [&trial.cut.one("installed"), &trial.cut.one("running")] == [&self.new.sha256; 2];
        findings.unless(exit != "0" || there, Wrong::FalseSuccess, "exit 0, and 1.5.0 is not what runs");
        if act.of == "ployzd" {
            self.files(&mut findings, &trial.cut);
            // What the second of two may say is not compared here with where it began.
            if act.earlier.is_none() {
                self.record(&mut findings, hit, &trial.cut);
                self.status(&mut findings, &trial.cut);
            }
            if !killed {
                self.told(&mut findings, &act, hit, &trial.cut);
            }
            self.rerun(&mut findings, &act, &trial.cut, &trial.again);
        }
        self.runs_at_last(&mut findings, &trial.again);
        Outcome { act, missed, exit, wrong: findings.0 }
    }

    fn executable(&self, findings: &mut Findings, cut: &Seen) {
        let installed = cut.one("installed");
        let whole = [&self.old.sha256, &self.new.sha256].iter().any(|one| *one == installed);
        let how = if installed.is_empty() { "there is no executable" } else { "the executable is neither" };
        findings.unless(whole, Wrong::Torn, how);
        let mode = cut.one("mode");
        findings.unless(!whole || mode == "root:root 755", Wrong::Torn, format!("the executable is {mode}"));
    }

    /// Everything else that an installation writes, and that the daemon serves all the while.
    fn files(&self, findings: &mut Findings, cut: &Seen) {
        let (before, done) = (&self.before, &self.done);
        for previous in cut.all("previous") {
            let whole = [&self.old.sha256, &self.older.sha256].contains(&previous);
            findings.unless(whole, Wrong::Torn, format!("ployzd.previous is {previous}"));
        }
        for name in ["unit", "sysusers"] {
            for file in cut.all(name) {
                let whole = before.all(name).contains(file) || done.all(name).contains(file);
                findings.unless(
                    whole,
                    Wrong::Torn,
                    format!("{name} {file} is neither the old nor the new one"),
                );
            }
            let same = cut.all(name).len() == before.all(name).len();
            findings.unless(same, Wrong::Torn, format!("{name}: {:?}", cut.all(name)));
        }
        findings.unless(cut.json("inventory").is_object(), Wrong::Torn, cut.one("inventory"));
        findings.unless(cut.one("readable") == "0", Wrong::Torn, format!("records: {:?}", cut.all("record")));
        let api = cut.json("api");
        let serves = api["ready"] == true && api["id"] == before.json("api")["id"];
        findings.unless(serves, Wrong::Torn, format!("the daemon says: {}", cut.one("api")));
    }

    /// Whether the installation is another than before.
    fn replaced(&self, cut: &Seen) -> &'static str {
        let same = cut.one("installed") == self.old.sha256 && cut.all("unit") == self.before.all("unit");
        if same { "unchanged" } else { "replaced" }
    }

    /// The attempt's own record.
    fn attempt(&self, seen: &Seen) -> Option<Value> {
        let before = self.before.records();
        seen.records().into_iter().find(|record| before.iter().all(|known| known["id"] != record["id"]))
    }

    /// What the record of the attempt says is so.
    fn record(&self, findings: &mut Findings, hit: &str, cut: &Seen) {
        let Some(record) = self.attempt(cut) else { return };
        let says = record["installation"] == "replaced";
        let is = self.replaced(cut);
        findings.unless(
            !says || is == "replaced",
            Wrong::Lie,
            format!("the record says replaced, and it is {is}"),
        );
        if cut.one("installed") == self.new.sha256 {
            let known = record["target_digest"] == self.new.sha256.as_str();
            findings.unless(known, Wrong::Lie, "the target's digest was not written before the rename");
        }
        let outcome = &record["outcome"];
        if outcome["succeeded"].is_object() {
            let there = cut.one("installed") == self.new.sha256 && cut.one("running") == self.new.sha256;
            findings.unless(there, Wrong::FalseSuccess, "the record says succeeded, and 1.5.0 does not run");
        }
        // Who was told an outcome finds the same in the record, unless it is the record that can't be written: at the call
        // that was hit, which may be another than the one that was meant.
        let told = cut.told();
        if told["outcome"].is_object() && !hit.contains("/attempts") {
            let same = told["outcome"] == *outcome;
            findings.unless(same, Wrong::Lie, format!("told {}, recorded {outcome}", told["outcome"]));
        }
    }

    /// What `ployzd status --json` says is so.
    fn status(&self, findings: &mut Findings, cut: &Seen) {
        let status = cut.json("status");
        let (last, state) = (&status["last"]["record"], &status["last"]);
        let mut says = |good: bool, what: &str| {
            let seen = format!("code {}, last {last}, state {state}", cut.one("code"));
            findings.unless(good, Wrong::Lie, format!("status, {what}: {seen}"));
        };
        says(status["installed"]["sha256"] == cut.one("installed"), "which executable is in place");
        says(status["admission"]["state"] == "free", "admission");
        match self.attempt(cut) {
            None => {
                says(*last == self.before.json("status")["last"]["record"], "the last attempt");
                says(cut.one("code") == "0", "nothing has happened");
            }
            Some(record) => {
                says(last["id"] == record["id"], "the last attempt");
                says(last["installation"] == self.replaced(cut), "whether the installation was changed");
                if record["outcome"].is_null() {
                    says(state["state"] == "interrupted", "that it was interrupted");
                    says(state["evidence"].as_str().is_some_and(|text| !text.is_empty()), "the evidence");
                    says(cut.one("code") == "4", "that something differs");
                } else {
                    says(state["state"] == "ended", "that it has ended");
                }
            }
        }
    }

    /// What whoever ran it was told: exit code and message.
    fn told(&self, findings: &mut Findings, act: &Act, hit: &str, cut: &Seen) {
        let (out, is) = (cut.json("out"), self.replaced(cut));
        let outcome = &out["record"]["outcome"];
        match cut.one("exit") {
            "0" => {
                // What could not be written is what whoever ran it should have been told: the record tells it.
                let unheard = hit.contains("/crash/out").then(|| self.attempt(cut)).flatten();
                let outcome = unheard.as_ref().map_or(outcome, |record| &record["outcome"]);
                let same = outcome["succeeded"]["sha256"] == self.new.sha256.as_str();
                findings.unless(same, Wrong::FalseSuccess, format!("exit 0, and the outcome is {out}"));
                return;
            }
            "4" => findings.unless(is == "unchanged", Wrong::Lie, format!("exit 4, and it is {is}: {out}")),
            "5" => findings.unless(is == "replaced", Wrong::Lie, format!("exit 5, and it is {is}: {out}")),
            code => findings.unless(false, Wrong::Lie, format!("exit {code}: {out} {}", cut.one("err"))),
        }
        let text = if act.injection == "error=EIO" { "(os error 5)" } else { "(os error 28)" };
        let named = cut.one("out").contains(text) || cut.one("err").contains(text);
        findings.unless(named, Wrong::Lie, format!("{text:?} is not named: {out} {}", cut.one("err")));
        let failed = outcome["failed"].is_object() || out["refused"].is_object();
        findings.unless(failed, Wrong::Lie, format!("neither failed nor refused: {out}"));
    }

    /// The same installation again, with nothing cleaned up.
    fn rerun(&self, findings: &mut Findings, act: &Act, cut: &Seen, again: &Seen) {
        let outcome = &again.told()["outcome"];
        let mut came = |good: bool, what: &str| findings.unless(good, Wrong::Hands, format!("again: {what}"));
        came(
            outcome["succeeded"]["sha256"] == self.new.sha256.as_str(),
            &format!("{} {}", again.one("out"), again.one("err")),
        );
        came(
            again.one("code") == "0",
            &format!("status has code {}: {}", again.one("code"), again.one("status")),
        );
        came(again.all("unit") == self.done.all("unit"), "the units are not those of 1.5.0");
        came(
            again.one("sysusers") == self.done.one("sysusers"),
            "the accounts are not declared as 1.5.0 does",
        );
        let inventory = again.json("inventory");
        came(inventory["current"]["confirmed"] == true, &format!("not confirmed: {inventory}"));
        came(again.one("previous") == self.old.sha256, "the retained binary is not 1.4.0");
        let described = &inventory["previous"]["sha256"];
        came(
            *described == self.old.sha256.as_str(),
            &format!("the retained binary is described as {described}"),
        );
        let api = again.json("api");
        came(api["id"] == self.before.json("api")["id"] && api["phase"] == "initialized", "its identity");
        came(again.one("units") == self.before.one("units"), &format!("units: {}", again.one("units")));
        came(again.one("count") == "32", &format!("{} records", again.one("count")));
        for record in cut.records().iter().filter(|record| record["outcome"].is_null()) {
            let closed =
                again.records().into_iter().find(|one| one["id"] == record["id"]).unwrap_or_default();
            let interrupted = closed["outcome"]["interrupted"].is_object();
            came(interrupted, &format!("the record is not closed: {closed}"));
            let so = act.earlier.is_some() || closed["installation"] == self.replaced(cut);
            came(so, &format!("closed as what it was not: {closed}"));
        }
    }

    /// That the new one is in place and runs, and nothing is left.
    fn runs_at_last(&self, findings: &mut Findings, again: &Seen) {
        findings.unless(again.one("exit") == "0", Wrong::Hands, format!("again: exit {}", again.one("exit")));
        let there = [&again.one("installed"), &again.one("running")] == [&self.new.sha256; 2];
        findings.unless(there, Wrong::Hands, "again: 1.5.0 is not what runs");
        findings.unless(again.all("left").is_empty(), Wrong::Left, again.all("left").join(" "));
    }
}
