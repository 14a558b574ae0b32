//! Many at once, and much at once: fifty installers of one machine, and an archive as large as one may be.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::collections::BTreeMap;

use scenarios::peaks::Peak;
use scenarios::{Machine, Run, note, release, release_padded, serve};
use serde_json::Value;

/// Starts fifty installers at once, half of them for people; whoever gets admission is held still until all others
/// have ended, so that it is there for each of them.
const CROWD: &str = r#"
    mkdir /root/crowd && cd /root/crowd || exit
    for n in $(seq 50); do
        json=--json
        [ $((n % 2)) = 0 ] || json=
        { /usr/local/bin/ployzd install $FROM $json >$n.out 2>$n.err; echo $? >$n.code.new; mv $n.code.new $n.code; } &
    done
    until winner=$(jq -e .pid /var/lib/ployz-install/admission.lock 2>/dev/null) && sleep 0.05 && kill -STOP "$winner"; do
        sleep 0.01
    done
    jq -r .attempt /var/lib/ployz-install/admission.lock >attempt
    until [ "$(ls | grep -c 'code$')" -ge 49 ]; do sleep 0.1; done
    kill -CONT "$winner"
    wait
    for n in $(seq 50); do
        jq -n -c --arg code "$(cat $n.code)" --rawfile out $n.out --rawfile err $n.err '{$code, $out, $err}'
    done"#;

/// The budget for each process of an installation.
const MOST_KIB: u64 = 16 * 1024;
/// The largest archive that is taken, in bytes.
const MOST_ARCHIVE: u64 = 64 * 1024 * 1024;

#[test]
fn of_fifty_installers_at_once_one_installs_and_the_others_name_it() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let machine = Machine::named("crowd").installed("1.4.0").boot();
    let from = machine.deliver(&new);
    let before = machine.attempts();
    let client = machine.client();
    let crowd = machine.run_within(110, &format!("FROM='{from}'; {CROWD}")).expect(0);
    let heard = client.stop();

    let attempt = machine.read("/root/crowd/attempt").trim().to_owned();
    let mut codes: BTreeMap<String, usize> = BTreeMap::new();
    for one in crowd.events() {
        let text = |field: &str| one[field].as_str().unwrap().to_owned();
        *codes.entry(text("code")).or_default() += 1;
        if text("code") == "3" {
            let said = format!("{}{}", text("out"), text("err"));
            assert!(said.contains(&attempt) && said.contains("busy"), "it does not name {attempt}: {one}");
        }
    }
    assert_eq!(codes, BTreeMap::from([("0".to_owned(), 1), ("3".to_owned(), 49)]));
    let ours: Vec<String> = machine.attempts().into_iter().filter(|id| !before.contains(id)).collect();
    assert_eq!(ours, [attempt.as_str()], "one attempt was accepted");
    assert!(machine.attempt(&attempt)["outcome"]["succeeded"].is_object());
    assert_eq!(heard.failures, Vec::<String>::new(), "requests failed meanwhile");
    let settled = |machine: &Machine| {
        machine.assert_runs("1.5.0", &new.sha256);
        machine.assert_nothing_left();
        assert_eq!(machine.run("systemctl list-units --all --no-legend 'ployz-install-*'").text(), "");
        assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), old.sha256);
    };
    settled(&machine);

    let again = machine.run(&format!("/usr/local/bin/ployzd install {from} --json")).expect(0);
    assert_eq!(again.outcome()["succeeded"]["nothing_was_needed"], true);
    settled(&machine);
    note(&format!("crowd: 50 installers ended after {:.1} s, codes {codes:?}", crowd.took.as_secs_f32()));
}

#[test]
fn an_installer_that_was_killed_is_not_taken_for_the_one_that_was_admitted_after_it() {
    let machine = Machine::named("successor").installed("1.4.0").boot();
    let upgrade = format!("/usr/local/bin/ployzd install {} --json", machine.deliver(&release("1.5.0")));
    let under = |injection: &str| format!("exec strace -qq -o /run/trace -e inject={injection} {upgrade}");
    // Killed after it was accepted: what it wrote of itself into the lock file stays there.
    let _ = machine.run(&under("rename:signal=KILL:when=2")).expect(137);
    let dead = machine.read("/var/lib/ployz-install/admission.lock");
    let dead: Value = serde_json::from_str(&dead).expect("what the killed one wrote");
    let dead = dead["attempt"].as_str().unwrap();
    assert_eq!(machine.status()["last"]["state"], "interrupted");

    // The next one has admission, and is held still before it writes anything of itself.
    let running = machine.start_run(&under("ftruncate:delay_enter=4000000:when=1"));
    machine.until("admission is held", |machine| machine.status()["admission"]["state"] != "free");
    let (status, refused) = (machine.status(), machine.run(&upgrade).expect(3));
    assert_eq!(status["admission"]["state"], "installing", "looked too late: {status}");
    assert_ne!(status["admission"]["holder"]["attempt"], dead, "the dead one is named: {status}");
    assert_ne!(status["last"]["state"], "running", "the dead one is said to run: {status}");
    assert!(!refused.both().contains(dead), "the dead one is named:\n{}", refused.shown());
    assert!(machine.run("/usr/local/bin/ployzd status").says(&["an installation"]).code != 0);
    let record = running.end().expect(0).record();
    assert!(record["outcome"]["succeeded"].is_object(), "{record}");
    assert_eq!(machine.attempt(dead)["outcome"]["interrupted"]["stage"], "accepted");
    machine.assert_nothing_left();
}

#[test]
fn no_process_of_an_installation_takes_more_than_16_mib_whatever_the_archive_holds() {
    let large = release_padded("1.5.0", 60);
    let length = std::fs::metadata(large.archive()).unwrap().len();
    assert!((MOST_ARCHIVE - length) < 4 * 1024 * 1024, "it has {length} bytes: nearly the largest");
    let server = serve("memory").release(&large).start();
    let machine = Machine::named("memory").served_by(&server).installed("1.4.0").boot();
    let from = machine.deliver(&large);

    let network = "/usr/local/bin/ployzd install --version 1.5.0 --json";
    let seen = measured(&machine, network, &large.sha256);
    assert!(seen.iter().any(|peak| peak.words == "fetch"), "the fetch child was not seen: {seen:?}");
    within("over the network", &seen);
    machine.run("/root/1.4.0-*/ployzd install --json").ok();
    within(
        "from an archive",
        &measured(&machine, &format!("/usr/local/bin/ployzd install {from} --json"), &large.sha256),
    );
}

/// Installs, and says what each process took.
fn measured(machine: &Machine, command: &str, sha256: &str) -> Vec<Peak> {
    let peaks = machine.peaks();
    let run: Run = machine.run_within(100, command);
    let seen = peaks.stop();
    let run = run.expect(0);
    assert_eq!(run.outcome()["succeeded"]["sha256"], sha256, "{}", run.shown());
    assert_eq!(run.record()["installation"], Value::from("replaced"));
    seen
}

/// Fails when a process that ran `ployzd` took more; says what each took, and the programs of the host beside them.
fn within(how: &str, seen: &[Peak]) {
    let ours = |peak: &&Peak| peak.executable.contains("ployzd");
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    for peak in seen.iter().filter(ours) {
        let known = most.entry(peak.words.clone()).or_default();
        *known = peak.kib.max(*known);
    }
    note(&format!("memory, 64 MiB {how}, KiB at most: {most:?}"));
    let host = seen.iter().filter(|peak| !ours(peak) && peak.executable.contains("system"));
    let host = host.max_by_key(|peak| peak.kib).map(|peak| format!("{} {}", peak.executable, peak.kib));
    note(&format!("  the largest program of systemd meanwhile: {host:?}"));
    assert!(most.keys().any(|words| words.starts_with("install")), "the installer was not seen: {seen:?}");
    for (words, kib) in most {
        assert!(kib <= MOST_KIB, "ployzd {words} took {kib} KiB");
    }
}
