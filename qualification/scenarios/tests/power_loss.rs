//! Real power loss in the middle of an installation: a kernel of its own, a disk with a write cache, and no shutdown.
//!
//! In the same five cuts a control is lost: the release unpacked over an old one by `tar`, without a flush, seconds
//! before the power goes. It shows that the machine loses what was not made durable; else the cuts would show nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use scenarios::vm::Vm;
use scenarios::{Release, note, release};
use serde_json::Value;

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
    installation: String,
    in_place: &'static str,
    units: String,
    evidence: String,
    control: String,
    control_lost: bool,
    rerun: String,
}

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
    note(&table(&rows));
    note(&format!("power loss: five cuts after {:.0} s", started.elapsed().as_secs_f32()));
    assert_eq!(rows.len(), MOMENTS.len());
    assert!(rows.iter().any(|row| row.control_lost), "the control lost nothing, so these cuts show nothing");
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
         for unit in /usr/local/lib/systemd/system/ployz.*; do echo '# a line of the operator' >>$unit; done
         systemctl daemon-reload
         systemctl restart ployz.socket ployz.service
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
        vm.boot();
        let seen = Seen::of(vm);
        let record = self.is_whole(moment, &seen);
        self.is_told(moment, &seen, &record);
        let row = self.row(moment, &seen, &record);
        let rerun = self.rerun(vm, moment, &record);
        let units = seen.units().iter().zip(self.before.units()).filter(|(now, then)| now != then).count();
        for (unit, after) in seen.units().iter().zip(rerun.0.units()) {
            let whole = unit == after || self.before.units().contains(unit);
            assert!(whole, "{moment}: {unit} is neither the old nor the new one: {seen:?}");
        }
        Row { units: format!("{units} of {}", seen.units().len()), rerun: rerun.1, ..row }
    }

    /// The control, then the installation, which the cut ends.
    fn cut_at(&self, vm: &Vm, moment: &str) {
        let run = vm.run(&format!(
            "bash -x /root/cut-at {moment} >/run/cut-at 2>&1 &
             until grep -qs established /run/watching; do sleep 0.05; done
             tar -C /usr/local/control -xzf /root/{}/ployzd_linux_amd64.tar.gz ployzd
             sha256sum </usr/local/control/ployzd
             ployzd install {} --json; echo; tail -30 /run/cut-at; ps -ef | grep cut-at",
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
    fn is_whole(&self, moment: &str, seen: &Seen) -> Value {
        let installed = seen.one("installed");
        assert!(
            [&self.old.sha256, &self.new.sha256].contains(&&installed),
            "{moment}: {installed}: {seen:?}"
        );
        for previous in seen.all("previous") {
            assert_eq!(*previous, self.old.sha256, "{moment}: the retained binary: {seen:?}");
        }
        let records: Vec<Value> = seen.all("record").iter().map(|text| json(text)).collect();
        let cut: Vec<&Value> = records.iter().filter(|record| record["target"] == "1.5.0").collect();
        assert_eq!((records.len(), cut.len()), (2, 1), "{moment}: {seen:?}");
        let record = cut[0].clone();
        assert_eq!(record["outcome"], Value::Null, "{moment}: {record}");
        assert_ne!(record["boot_id"], seen.one("boot"), "{moment}: the boot in which it was accepted");
        if installed == self.new.sha256 {
            assert_eq!(
                record["target_digest"], self.new.sha256,
                "{moment}: written before the rename: {record}"
            );
        }
        if record["installation"] == "replaced" {
            assert_eq!(installed, self.new.sha256, "{moment}: the record says that it is replaced: {record}");
        }
        let (api, before) = (json(&seen.one("api")), json(&self.before.one("api")));
        assert_eq!(api["ready"], true, "{moment}: {api}");
        assert_eq!(api["executable_sha256"], installed, "{moment}: {api}");
        assert_eq!(api["phase"], "initialized", "{moment}: {api}");
        assert_eq!(api["id"], before["id"], "{moment}: its identity");
        record
    }

    /// What `ployzd status` says of it.
    fn is_told(&self, moment: &str, seen: &Seen, record: &Value) {
        let (status, told, boot) = (json(&seen.one("status")), seen.one("told"), seen.one("boot"));
        assert_eq!(seen.one("code"), "4", "{moment}: {told}");
        assert_eq!(status["installed"]["Ok"]["sha256"], seen.one("installed"), "{moment}: {status}");
        let state = &status["last"]["Ok"][1];
        assert_eq!(state["state"], "interrupted", "{moment}: {state}");
        let evidence = state["evidence"].as_str().unwrap();
        for id in [record["boot_id"].as_str().unwrap(), &boot] {
            assert!(evidence.contains(&id[..4]), "{moment}: {evidence:?} does not name boot {id}");
        }
        let stage = record["stage"].as_str().unwrap();
        assert!(told.contains(&format!("INTERRUPTED at {stage}")), "{moment}: {told}");
        let unchanged = seen.one("installed") == self.old.sha256 && seen.units() == self.before.units();
        assert_eq!(
            told.contains("installation unchanged"),
            unchanged,
            "{moment}: of {record} it says: {told}"
        );
    }

    /// The same installation again; what is seen afterwards, and how long it took.
    fn rerun(&self, vm: &Vm, moment: &str, cut: &Value) -> (Seen, String) {
        let run = vm.run(&format!("ployzd install {} --json", self.from)).expect(0);
        assert_eq!(run.outcome()["succeeded"]["sha256"], self.new.sha256, "{moment}");
        let seen = Seen::of(vm);
        assert_eq!(seen.one("code"), "0", "{moment}: {}", seen.one("told"));
        assert_eq!(seen.one("installed"), self.new.sha256, "{moment}");
        assert_eq!(seen.all("previous"), [self.old.sha256.clone()], "{moment}: the retained binary");
        let status = json(&seen.one("status"));
        assert_eq!(status["previous"]["version"], "1.4.0", "{moment}: {}", seen.one("told"));
        let records: Vec<Value> = seen.all("record").iter().map(|text| json(text)).collect();
        let closed = records.iter().find(|record| record["id"] == cut["id"]).unwrap();
        assert_eq!(closed["outcome"]["interrupted"]["stage"], cut["stage"], "{moment}: {closed}");
        assert!(
            closed["outcome"]["interrupted"]["evidence"].as_str().unwrap().contains("restarted"),
            "{closed}"
        );
        assert_eq!(
            json(&seen.one("api"))["id"],
            json(&self.before.one("api"))["id"],
            "{moment}: its identity"
        );
        assert_eq!(seen.all("left").concat(), "", "{moment}: left behind");
        (seen, format!("confirmed in {:.1} s", run.took.as_secs_f32()))
    }

    fn row(&self, moment: &'static str, seen: &Seen, record: &Value) -> Row {
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let control = seen.one("control");
        let (digest, size) = control.split_once(' ').unwrap_or_default();
        let control_is = match digest {
            digest if digest == self.new.sha256 => "the new one".to_owned(),
            digest if digest == self.old.sha256 => "the old one".to_owned(),
            _ => format!("BROKEN, {size} bytes"),
        };
        Row {
            moment,
            stage: text(&record["stage"]),
            installation: text(&record["installation"]),
            in_place: if seen.one("installed") == self.new.sha256 { "1.5.0" } else { "1.4.0" },
            units: String::new(),
            evidence: text(&json(&seen.one("status"))["last"]["Ok"][1]["evidence"]),
            control: control_is,
            control_lost: digest != self.new.sha256,
            rerun: String::new(),
        }
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

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?} is not JSON: {e}"))
}

fn table(rows: &[Row]) -> String {
    let mut lines = vec![format!(
        "{:<12} {:<12} {:<12} {:<9} {:<10} {:<48} {:<18} {}",
        "cut at", "record", "it says", "in place", "new units", "evidence", "control (tar)", "again"
    )];
    for row in rows {
        lines.push(format!(
            "{:<12} {:<12} {:<12} {:<9} {:<10} {:<48} {:<18} {}",
            row.moment,
            row.stage,
            row.installation,
            row.in_place,
            row.units,
            row.evidence,
            row.control,
            row.rerun
        ));
    }
    lines.join("\n")
}
