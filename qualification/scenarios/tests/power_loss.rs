//! Real power loss in the middle of an installation: a kernel of its own, a disk with a write cache, and no shutdown.
//!
//! In the same five cuts a control is lost: the release unpacked by `tar` and put over an old one by `mv`, without a
//! flush, seconds before the power goes. It shows that the machine loses what was not made durable; else the cuts would
//! show nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::time::Instant;

use scenarios::vm::Vm;
use scenarios::{Release, Run, note, release};
use serde_json::{Value, json};

/// What the power is cut at, as `CUT_AT` sees it from inside.
const MOMENTS: [&str; 5] = ["acquiring", "extracting", "renamed", "restarting", "confirming"];

/// Cuts this machine's power when an installation comes to `$1`: when the record of that stage has its name, when the
/// first bytes of the new executable are written, or when the executable is renamed.
const CUT_AT: &str = r#"
inotifywait -m -e moved_to -e modify --format '%e %w%f' /var/lib/ployz-install/attempts /usr/local/bin 2>/run/watching |
    while read -r event path; do
        case $event,$path in
            MOVED_TO,/usr/local/bin/ployzd) now=renamed ;;
            MODIFY,/usr/local/bin/.ployzd.*) now=extracting ;;
            MOVED_TO,*/attempts/*.json)
                [[ $(<"$path") =~ '"stage": "'([a-z]+) ]] || continue
                now=${BASH_REMATCH[1]} ;;
            *) continue ;;
        esac
        [ "$now" != "$1" ] || echo >/dev/ttyS1
    done
"#;

/// One line a fact.
const LOOK: &str = r#"
    line() { printf '%s\t%s\n' "$1" "$2"; }
    digest() { sha256sum <"$1" | cut -c-64; }
    cd /usr/local
    line boot "$(</proc/sys/kernel/random/boot_id)"
    line installed "$(digest bin/ployzd)"
    [ ! -e bin/ployzd.previous ] || line previous "$(digest bin/ployzd.previous)"
    for unit in lib/systemd/system/ployz*; do line unit "${unit##*/} $(digest "$unit")"; done
    for record in /var/lib/ployz-install/attempts/*.json; do line record "$(tr '\n' ' ' <"$record")"; done
    line api "$(curl -sS --max-time 20 --unix-socket /run/ployz/ployz.sock http://machine/v1/machine)"
    status=$(ployzd status --json); line code $?
    line status "$status"
    line told "$(ployzd status | tr '\n' '|')"
    line control "$(digest control/ployzd) $(stat -c %s control/ployzd)"
    line left "$(find bin lib/ployz lib/systemd lib/sysusers.d /var/lib/ployz-install -name '.*' | paste -sd ' ')"
    line left "$(find lib/ployz/staging lib/ployz/self -mindepth 1 2>/dev/null | paste -sd ' ')"
"#;

/// A machine as it was seen at one moment.
#[derive(Debug)]
struct Seen(BTreeMap<String, Vec<String>>);

/// What one cut came to.
struct Row {
    moment: &'static str,
    stage: String,
    said: String,
    in_place: &'static str,
    units: String,
    evidence: String,
    control: String,
    control_lost: bool,
    seconds: String,
    faults: Faults,
}

/// What was not as it should be: collected, so that one run shows all five cuts.
#[derive(Debug, Default)]
struct Faults(Vec<String>);

/// What is the same in all trials.
struct Trial<'a> {
    old: &'a Release,
    new: &'a Release,
    /// The arguments that install the new one.
    from: String,
    before: Seen,
}

#[test]
fn five_power_cuts_leave_a_whole_executable_and_an_honest_record() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let started = Instant::now();
    let first = Vm::booted("power-loss");
    let (from, before) = prepare(&first, &old, &new);
    first.snapshot("prepared");
    first.cut();
    let second = first.copy("power-loss-2");
    note(&format!("power loss: prepared after {:.0} s", started.elapsed().as_secs_f32()));

    let trial = Trial { old: &old, new: &new, from, before };
    let (moments, rows) = (Mutex::new(MOMENTS.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for vm in [&first, &second] {
            scope.spawn(|| {
                while let Some(moment) = { moments.lock().unwrap().next() } {
                    let row = trial.carry_out(vm, moment);
                    rows.lock().unwrap().push(row);
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap();
    rows.sort_by_key(|row| MOMENTS.iter().position(|moment| *moment == row.moment));
    note(&format!("power loss: five cuts, {:.0} s{}", started.elapsed().as_secs_f32(), table(&rows)));
    assert_eq!(rows.len(), MOMENTS.len());
    assert!(rows.iter().any(|row| row.control_lost), "the control lost nothing, so these cuts show nothing");
    for row in &rows {
        assert!(row.faults.0.is_empty(), "cut at {}:\n  {}", row.moment, row.faults.0.join("\n  "));
    }
}

/// The old release confirmed and initialized, with units that the new one will replace; everything that a trial needs,
/// on the disk.
fn prepare(vm: &Vm, old: &Release, new: &Release) -> (String, Seen) {
    let (from_old, from_new) = (vm.deliver(old), vm.deliver(new));
    vm.run(&format!(
        "set -e
         mkdir -p /etc/ployz && echo '{{\"schema\": 1, \"confirm_window\": 1}}' >/etc/ployz/install.json
         tar -C /run -xzf /root/{version}/ployzd_linux_amd64.tar.gz ployzd
         /run/ployzd install {from_old} --docker none
         ployzd machine initialize
         for unit in /usr/local/lib/systemd/system/ployz*; do echo '# a line of the operator' >>$unit; done
         systemctl daemon-reload
         systemctl stop ployz.socket ployz.service ployz-upgrade.socket
         systemctl start ployz.socket ployz-upgrade.socket ployz.service
         mkdir /usr/local/control && cp /usr/local/bin/ployzd /usr/local/control/",
        version = old.version,
    ))
    .ok();
    vm.write("/root/cut-at", CUT_AT);
    let before = Seen::of(vm);
    assert_eq!(before.one("code"), "0", "{before:?}");
    assert_eq!(before.one("installed"), old.sha256, "{before:?}");
    (from_new, before)
}

impl Trial<'_> {
    fn carry_out(&self, vm: &Vm, moment: &'static str) -> Row {
        vm.restore("prepared");
        self.cut_at(vm, moment);
        let cut = Instant::now();
        vm.boot();
        let seen = Seen::of(vm);
        let booted = cut.elapsed().as_secs();
        let mut faults = Faults::default();
        let record = self.is_whole(&seen, &mut faults);
        self.is_told(&seen, &record, &mut faults);
        let run = vm.run(&format!("ployzd install {} --json", self.from));
        let after = Seen::of(vm);
        self.is_repaired(&run, &seen, &after, &record, &mut faults);
        if !faults.0.is_empty() {
            faults.0.push(format!("after the cut it says: {}", seen.one("told").replace('|', "\n    ")));
            faults.0.push(format!("again: {}", run.shown()));
            faults.0.push(format!("after that it says: {}", after.one("told").replace('|', "\n    ")));
        }
        let replaced = seen.units().iter().filter(|unit| !self.before.units().contains(unit)).count();
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let (control, control_lost) = self.control(&seen);
        Row {
            moment,
            stage: text(&record["stage"]),
            said: text(&parse(&seen.one("status"))["last"]["record"]["installation"]),
            in_place: match seen.one("installed") {
                digest if digest == self.old.sha256 => "1.4.0",
                digest if digest == self.new.sha256 => "1.5.0",
                _ => "BROKEN",
            },
            units: format!("{replaced} of {}", seen.units().len()),
            evidence: text(&parse(&seen.one("status"))["last"]["evidence"]),
            control,
            control_lost,
            seconds: format!("{booted} s, {:.0} s", run.took.as_secs_f32()),
            faults,
        }
    }

    /// The control, then the installation, which the cut ends.
    fn cut_at(&self, vm: &Vm, moment: &str) {
        let run = vm.run(&format!(
            "bash /root/cut-at {moment} >/dev/null 2>&1 &
             until grep -qs established /run/watching; do sleep 0.05; done
             cd /usr/local/control
             mkdir next && tar -C next -xzf /root/{}/ployzd_linux_amd64.tar.gz ployzd && mv next/ployzd ployzd
             sha256sum </usr/local/control/ployzd
             ployzd install {} --json
             exit", // not by exec: the installer would be the parent of what watches it
            self.new.version, self.from
        ));
        assert_eq!(run.code, 255, "the power was not cut at {moment}:\n{}", run.shown());
        assert!(
            run.stdout.starts_with(&self.new.sha256),
            "the control was not whole before:\n{}",
            run.shown()
        );
        // There is none left; this waits for its end.
        vm.cut();
    }

    /// What must be so on the disk and in the daemon. Returns the record of the attempt that was cut.
    fn is_whole(&self, seen: &Seen, faults: &mut Faults) -> Value {
        let installed = seen.one("installed");
        let known = [&self.old.sha256, &self.new.sha256];
        faults.unless(known.contains(&&installed), || {
            format!("the executable is neither release: {installed}")
        });
        for previous in seen.all("previous") {
            faults.same("the retained binary", previous, &self.old.sha256);
        }
        let records: Vec<Value> = seen.all("record").iter().map(|text| parse(text)).collect();
        let cut: Vec<&Value> = records.iter().filter(|record| record["target"] == "1.5.0").collect();
        faults.unless((records.len(), cut.len()) == (2, 1), || format!("not two whole records: {records:?}"));
        let record = cut.first().map_or(Value::Null, |record| (*record).clone());
        faults.same("its outcome", &record["outcome"], &Value::Null);
        faults.unless(record["boot_id"] != seen.one("boot"), || "it was accepted in this boot".into());
        if installed == self.new.sha256 {
            faults.same("the digest before the rename", &record["target_digest"], &json!(self.new.sha256));
        }
        if record["switched"].as_array().is_some_and(|files| files.contains(&json!("/usr/local/bin/ployzd")))
        {
            faults.same("what the record has switched", &installed, &self.new.sha256);
        }
        let (api, before) = (parse(&seen.one("api")), parse(&self.before.one("api")));
        faults.same("ready", &api["ready"], &json!(true));
        faults.same("the digest that runs", &api["executable_sha256"], &json!(installed));
        faults.same("the phase", &api["phase"], &json!("initialized"));
        faults.same("its identity", &api["id"], &before["id"]);
        record
    }

    /// What `ployzd status` says of it.
    fn is_told(&self, seen: &Seen, record: &Value, faults: &mut Faults) {
        let (status, told, boot) = (parse(&seen.one("status")), seen.one("told"), seen.one("boot"));
        faults.same("the exit code of status", &seen.one("code"), "4");
        faults.same("what is in place", &status["installed"]["sha256"], &json!(seen.one("installed")));
        let state = &status["last"];
        faults.same("the state of the last attempt", &state["state"], &json!("interrupted"));
        let evidence = state["evidence"].as_str().unwrap_or_default();
        for id in [record["boot_id"].as_str().unwrap_or_default(), &boot] {
            let named = id.get(..4).is_some_and(|id| evidence.contains(id));
            faults.unless(named, || format!("the evidence {evidence:?} does not name boot {id}"));
        }
        let stage = record["stage"].as_str().unwrap_or_default();
        faults.unless(told.contains(&format!("INTERRUPTED at {stage}")), || {
            "it is not told as interrupted".into()
        });
        let unchanged = seen.one("installed") == self.old.sha256 && seen.units() == self.before.units();
        faults.same("told as unchanged", &told.contains("installation unchanged"), &unchanged);
        if seen.all("previous") == std::slice::from_ref(&self.old.sha256) {
            let described = &status["previous"]["described"];
            faults.same("the previous version", &described["version"], &json!("1.4.0"));
        }
    }

    /// What must be so after the same installation was run again.
    fn is_repaired(&self, run: &Run, seen: &Seen, after: &Seen, record: &Value, faults: &mut Faults) {
        faults.same("the exit code of the second run", &run.code, &0);
        faults.same("the exit code of status afterwards", &after.one("code"), "0");
        faults.same("the executable afterwards", &after.one("installed"), &self.new.sha256);
        faults.same("the retained binary afterwards", &after.one("previous"), &self.old.sha256);
        let status = parse(&after.one("status"));
        let described = &status["previous"]["described"];
        faults.same("the previous version afterwards", &described["version"], &json!("1.4.0"));
        faults.same("left behind", &after.all("left").concat(), "");
        let (api, before) = (parse(&after.one("api")), parse(&self.before.one("api")));
        faults.same("its identity afterwards", &api["id"], &before["id"]);
        faults.same("the digest that runs afterwards", &api["executable_sha256"], &json!(self.new.sha256));
        let records: Vec<Value> = after.all("record").iter().map(|text| parse(text)).collect();
        let closed = records.iter().find(|closed| closed["id"] == record["id"]).cloned().unwrap_or_default();
        let outcome = &closed["outcome"]["interrupted"];
        faults.same("where the cut attempt was closed", &outcome["stage"], &record["stage"]);
        let restarted = outcome["evidence"].as_str().is_some_and(|evidence| evidence.contains("restarted"));
        faults.unless(restarted, || format!("the cut attempt is closed as {}", closed["outcome"]));
        for unit in seen.units() {
            let whole = after.units().contains(unit) || self.before.units().contains(unit);
            faults.unless(whole, || format!("after the cut {unit} is neither the old nor the new one"));
        }
        let own: Vec<_> = after.units().iter().filter(|unit| self.before.units().contains(unit)).collect();
        faults.unless(own.is_empty(), || format!("units that are not the release's: {own:?}"));
    }

    /// What the control is now, and whether it was lost.
    fn control(&self, seen: &Seen) -> (String, bool) {
        let control = seen.one("control");
        let (digest, size) = control.split_once(' ').unwrap_or_default();
        match digest {
            digest if digest == self.new.sha256 => ("the new one".into(), false),
            digest if digest == self.old.sha256 => ("still the old one".into(), true),
            _ => (format!("BROKEN, {size} bytes"), true),
        }
    }
}

impl Faults {
    fn unless(&mut self, good: bool, fault: impl FnOnce() -> String) {
        if !good {
            self.0.push(fault());
        }
    }

    fn same<A: PartialEq<B> + Debug + ?Sized, B: Debug + ?Sized>(
        &mut self,
        what: &str,
        seen: &A,
        expected: &B,
    ) {
        self.unless(seen == expected, || format!("{what}: {seen:?}, expected {expected:?}"));
    }
}

impl Seen {
    fn of(vm: &Vm) -> Self {
        let mut facts: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in vm.run(LOOK).expect(0).stdout.lines() {
            let (name, value) = line.split_once('\t').unwrap_or((line, ""));
            facts.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        Self(facts)
    }

    fn all(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    fn one(&self, name: &str) -> String {
        self.all(name).first().cloned().unwrap_or_default()
    }

    /// Their names and digests.
    fn units(&self) -> &[String] {
        self.all("unit")
    }
}

/// As JSON; what is none is shown as it is, by whichever check looks into it.
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!({"not JSON": text}))
}

fn table(rows: &[Row]) -> String {
    let mut text =
        line(["cut at", "record", "it says", "in place", "new units", "control", "boot, again", "evidence"]);
    for row in rows {
        text += &line([
            row.moment,
            &row.stage,
            &row.said,
            row.in_place,
            &row.units,
            &row.control,
            &row.seconds,
            &row.evidence,
        ]);
    }
    text
}

fn line([a, b, c, d, e, f, g, h]: [&str; 8]) -> String {
    format!("\n{a:<11} {b:<11} {c:<10} {d:<9} {e:<10} {f:<20} {g:<12} {h}")
}
