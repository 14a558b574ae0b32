//! What children of an installer that nobody trusts can do: the one that speaks to the network, and a new binary
//! before it is the release. And what the daemon's uid can do to any of it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, Release, note, release, release_variant, serve};

const PLOYZD: &str = "/usr/local/bin/ployzd";
const UPGRADE: &str = "/usr/local/bin/ployzd install --version 1.6.0 --json";
/// Where the attacker is, for everyone.
const ATTACKER: &str = "/opt/attacker";
/// The processes of the account that children have.
const CHILDREN: &str = r#"awk -v uid=$(id -u ployz-fetch) -F '[ \t]+' \
    '/^Uid:/ && $2 == uid { split(FILENAME, part, "/"); print part[3] }' /proc/[0-9]*/status"#;

/// A release whose `ployzd` does what it should not.
fn hostile() -> Release {
    release_variant("1.6.0", "attacker")
}

/// How each try of the attacker at a process ended: `read mem: EACCES`.
fn tried(machine: &Machine, user: &str, pid: &str) -> Vec<(String, String)> {
    let run = machine.run_as(user, &format!("{ATTACKER} on {pid}")).expect(0);
    let parted = |line: &str| line.split_once(": ").map(|(what, how)| (what.to_owned(), how.to_owned()));
    let tried: Vec<_> = run.text().lines().filter_map(parted).collect();
    assert!(tried.len() >= 20, "{}", run.shown());
    tried
}

/// Those that ended otherwise than by a want of permission.
fn not_refused(tried: &[(String, String)]) -> Vec<&(String, String)> {
    tried.iter().filter(|(_, how)| how != "EACCES" && how != "EPERM").collect()
}

#[test]
fn the_child_that_fetches_has_no_right_and_nobody_of_another_uid_can_touch_it() {
    let server = serve("child").release(&hostile()).start();
    let machine = Machine::named("child").served_by(&server).installed("1.4.0").boot();
    machine.put(&hostile().ployzd(), ATTACKER);
    server.drip_archives();
    let running = machine.start_run(UPGRADE);
    machine.until("an archive is being fetched", |machine| {
        machine.run("find /usr/local/lib/ployz/staging -name '*.tar.gz' -size +1 | grep -q .").code == 0
    });
    let children = machine.run(CHILDREN).expect(0);
    let pid = children.text().to_owned();
    assert!(pid.parse::<u32>().is_ok(), "one child fetches: {pid:?}");
    let command = machine.run(&format!("tr '\\0' ' ' </proc/{pid}/cmdline")).expect(0);
    assert!(command.stdout.ends_with("fetch "), "{}", command.shown());

    let account = machine.run("id -u ployz-fetch; id -g ployz-fetch").expect(0);
    let (uid, gid) = account.text().split_once('\n').unwrap();
    let status = machine.read(&format!("/proc/{pid}/status"));
    let fields: Vec<Vec<&str>> = status.lines().map(|line| line.split_whitespace().collect()).collect();
    let field = |name: &str| fields.iter().find(|f| f[0] == format!("{name}:")).map(|f| f[1..].to_vec());
    assert_eq!(field("Uid"), Some(vec![uid; 4]), "{status}");
    assert_eq!(field("Gid"), Some(vec![gid; 4]), "{status}");
    assert_eq!(field("Groups"), Some(vec![]), "{status}");
    assert_eq!(field("NoNewPrivs"), Some(vec!["1"]), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(field(set), Some(vec!["0000000000000000"]), "{set}: {status}");
    }
    let limits = machine.read(&format!("/proc/{pid}/limits"));
    for limit in ["Max file size", "Max core file size"] {
        let line = limits.lines().find(|line| line.starts_with(limit)).unwrap();
        assert_eq!(line.split_whitespace().filter(|word| *word == "0").count(), 2, "{line}");
    }
    // Who may be dumped has files of his own there; who may not, root's.
    let owners =
        machine.run(&format!("cd /proc/{pid} && stat -c %U mem maps environ fd | sort -u")).expect(0);
    assert_eq!(owners.text(), "root", "it could be dumped");
    let open = machine.run(&format!("cd /proc/{pid}/fd && for fd in *; do readlink $fd; done")).expect(0);
    let files: Vec<_> = open.text().lines().filter(|to| to.starts_with('/')).collect();
    assert_eq!(files, Vec::<&str>::new(), "it holds a file open");

    // The daemon's account, without any of the daemon's confinement.
    let seen = tried(&machine, "ployz", &pid);
    assert!(not_refused(&seen).is_empty(), "of the daemon's uid: {:?}", not_refused(&seen));
    assert!(seen.iter().any(|(what, _)| what == "SIGKILL"), "{seen:?}");
    // Its own account: it can be ended by that, and no more.
    let seen = tried(&machine, "ployz-fetch", &pid);
    let can = ("signal".to_owned(), "worked".to_owned());
    assert_eq!(not_refused(&seen), [&can], "of its own uid");
    // The attacker is one: what may be touched, it touches.
    let own = machine.run_as("ployz", &format!("sleep 60 & {ATTACKER} on $!; kill $!")).expect(0);
    let _ = own.says(&["read maps: worked", "read environ: worked", "list fd: worked", "signal: worked"]);

    machine.run("kill -INT $(jq .pid /var/lib/ployz-install/admission.lock)").ok();
    let _ = running.end().expect(4);
    assert_eq!(machine.run(CHILDREN).expect(0).text(), "", "it outlives its installer");
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
}

#[test]
fn a_hostile_binary_makes_nothing_reads_nothing_gains_nothing_and_leaves_nothing_before_it_is_trusted() {
    let server = serve("hostile").release(&hostile()).start();
    let machine = Machine::named("hostile").served_by(&server).installed("1.4.0").boot();
    let before = machine.watch();
    let run = machine.run(UPGRADE).expect(4);
    let failed = &run.outcome()["failed"];
    assert_eq!(
        (&failed["stage"], &failed["reason"]),
        (&"preflight".into(), &"does_not_run".into()),
        "{failed}"
    );
    let said = failed["error"].as_str().unwrap();
    note(&format!("a hostile binary in preflight: {said}"));
    let tried = said.split(';').next_back().unwrap().trim();
    let (number, rest) = tried.split_once(' ').unwrap();
    assert!(number.parse::<usize>().is_ok_and(|number| number > 500), "{said}");
    assert_eq!(rest, "things tried, 0 worked", "{said}");

    // The same from outside: it is gone with what it started, and owns nothing.
    assert_eq!(machine.run(CHILDREN).expect(0).text(), "", "something of it still runs");
    let made = "find / /tmp /dev /dev/shm /dev/mqueue /run /run/lock -xdev \
        \\( -user ployz-fetch -o -name 'attacker-*' \\) -not -path '/proc/*' | sort -u";
    assert_eq!(machine.run(made).expect(0).text(), "", "it has made something");
    before.assert_same(&machine.watch());
    machine.assert_nothing_left();
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
}

#[test]
fn the_daemons_uid_can_write_nothing_of_the_installation() {
    let machine = Machine::named("daemons-uid").installed("1.4.0").boot();
    machine.run(&format!("{PLOYZD} machine initialize")).ok();
    // Without any of the daemon's confinement, which forbids it once more.
    let may = "find / -xdev \\( -type f -o -type d \\) -writable -not -path '/proc/*' 2>/dev/null; \
        find /run -xdev \\( -type f -o -type d \\) -writable 2>/dev/null; true";
    let found = machine.run_as("ployz", may).expect(0);
    let own = |path: &&str| *path != "/var/lib/ployz" && !path.starts_with("/var/lib/ployz/");
    let everyones = ["/tmp", "/var/tmp", "/run/lock", "/dev/shm", "/dev/mqueue"];
    let others = found.text().lines().filter(own);
    let others: Vec<_> = others.filter(|path| !everyones.contains(path)).collect();
    assert_eq!(others, Vec::<&str>::new(), "the daemon could write there");
    assert!(
        found.text().contains("/var/lib/ployz/identity.json"),
        "the search found nothing:\n{}",
        found.shown()
    );
    let id = machine.attempts()[0].clone();
    for path in [
        "/usr/local/bin/ployzd",
        "/usr/local/lib/ployz/installed.json",
        "/usr/local/lib/systemd/system/ployz.service",
        "/usr/local/lib/sysusers.d/ployz.conf",
        "/etc/ployz/install.json",
        "/var/lib/ployz-install/admission.lock",
        &format!("/var/lib/ployz-install/attempts/{id}.json"),
    ] {
        machine.run(&format!("test -f {path}")).ok();
        let run = machine.run_as("ployz", &format!(": >>{path}"));
        assert_ne!(run.code, 0, "{path} was opened for writing");
        let run = machine.run_as("ployz", &format!("rm -f {path} || mv {path} {path}.x"));
        assert_ne!(run.code, 0, "{path} was removed");
    }
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
}
