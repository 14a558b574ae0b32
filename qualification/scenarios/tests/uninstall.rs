//! Removal: from healthy Machines and broken ones, cut off anywhere and gone on with; what is said to be gone is gone, what
//! is said to be kept is there, and nothing of anyone else is touched.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, note, release};
use serde_json::Value;

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// Everything that is called after us, but for what Docker keeps below its own directories.
const FIND: &str = "find / -xdev \\( -path /proc -o -path /sys -o -path /var/lib/docker -o -path /var/lib/containerd -o -path /root \
    -o -path /var/log -o -path /tmp \\) -prune -o -name '*ployz*' ! -name '*ployz-qualification*' -print; find /run -name '*ployz*' | grep -v /run/systemd; \
    getent passwd | cut -d: -f1 | grep ployz; getent group | cut -d: -f1 | grep ployz; \
    systemctl list-units --all --plain --no-legend 'ployz*' | cut -d' ' -f1; true";
/// What is somebody else's.
const OTHERS: &str = "docker ps -a --no-trunc --format '{{.ID}} {{.Names}} {{.State}}' | grep -v ployz-; docker images -q | sort; docker volume ls -q | grep -vx data | sort; \
    docker network ls -q | sort; cat /etc/docker/daemon.json; ls -la /srv";

fn whole(name: &str) -> Machine {
    let machine = Machine::named(name).image(Image::TrixieDocker).boot();
    machine.start_docker();
    machine.run("docker run -d --name other web:1 && docker volume create others && touch /srv/others").ok();
    install(&machine);
    machine
}

fn install(machine: &Machine) {
    let from = machine.deliver(&release("1.4.0"));
    let dir = from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
    machine.run(&format!("{dir}/ployzd install {from} --docker auto")).ok();
    machine
        .run(&format!("{PLOYZD} service deploy web --image web:1 --volume data:/data --publish 8080:8080"))
        .ok();
    machine.run("docker exec ployz-web /bin/sh -c 'echo kept >/data/file'").ok();
    machine.run(&format!("{PLOYZD} machine initialize --name m; true")).ok();
}

fn lines(machine: &Machine) -> Vec<String> {
    machine.run_within(60, FIND).stdout.lines().map(str::to_owned).collect()
}

/// What is left is what is said to be kept.
fn assert_gone(machine: &Machine, outcome: &Value, purge: bool) {
    assert_eq!(outcome["failed"], serde_json::json!([]), "{outcome}");
    let kept: Vec<&str> =
        outcome["kept"].as_array().unwrap().iter().filter_map(|k| k["what"].as_str()).collect();
    for left in lines(machine) {
        let said = kept.iter().any(|what| left.starts_with(what) || what.contains(&left));
        // Volumes stay, whatever is asked.
        let volume = left.starts_with("/var/lib/ployz-volumes");
        assert!(said && (!purge || volume), "{left} is left (kept: {kept:?})");
    }
    // Docker does not wait for the plugin that is gone.
    machine.run("timeout 1 docker volume ls -q").ok();
    let data = machine.run("cat /var/lib/ployz-volumes/data/_data/file");
    assert_eq!(data.text(), "kept", "a volume with data is gone: {}", data.shown());
    assert_eq!(machine.run("docker ps -aq --filter label=ployz.service").text(), "");
    assert_eq!(machine.run("systemctl is-system-running").text(), "running");
}

#[test]
fn what_is_ours_goes_what_is_not_stays_and_it_can_be_installed_again() {
    let machine = whole("uninstall");
    machine.run("mkdir -p /etc/systemd/system/ployz.service.d; echo '[Service]' >/etc/systemd/system/ployz.service.d/o.conf").ok();
    let others = machine.run(OTHERS).expect(0).stdout;
    // Not without a yes, and not by anybody.
    machine.run("useradd -m alice").ok();
    let before = machine.watch();
    let _ = machine
        .run(&format!("{PLOYZD} uninstall </dev/null"))
        .expect(4)
        .says(&["uninstall --yes", "nothing was changed"]);
    let _ = machine.run_as("alice", &format!("{PLOYZD} uninstall --yes")).expect(77).says(&["sudo"]);
    before.assert_same(&machine.watch());

    let run = machine.run_within(120, &format!("{PLOYZD} uninstall --yes --json")).expect(0);
    let outcome = run.last();
    let removed = outcome["removed"].to_string();
    for what in [
        "container ployz-web",
        "/usr/local/bin/ployzd",
        "ployz.service",
        "/run/ployz",
        "/usr/local/lib/ployz",
        "sysusers.d/ployz.conf",
    ] {
        assert!(removed.contains(what), "{what}: {removed}");
    }
    let kept = outcome["kept"].to_string();
    for what in [
        "volume data",
        "/var/lib/ployz",
        "/var/lib/ployz-install",
        "user ployz",
        "/etc/systemd/system/ployz.service.d",
    ] {
        assert!(kept.contains(what), "{what}: {kept}");
    }
    assert_gone(&machine, &outcome, false);
    assert_eq!(machine.run(OTHERS).expect(0).stdout, others, "something of somebody else was touched");
    // Nothing is left to be removed, by a binary that comes from elsewhere.
    let from = machine.deliver(&release("1.4.0"));
    let dir = from
        .split(" --archive ")
        .nth(1)
        .and_then(|rest| rest.split("/ployzd_linux").next())
        .unwrap()
        .to_owned();
    let again = machine.run(&format!("{dir}/ployzd uninstall --yes")).expect(0);
    note(&format!("again: {}", again.both().lines().next().unwrap_or_default()));
    // Identity and records are there when it is installed again.
    install(&machine);
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    assert_eq!(machine.api()["name"], "m");
    machine.run("rm -r /etc/systemd/system/ployz.service.d").ok();

    let run = machine.run_within(120, &format!("{PLOYZD} uninstall --purge --yes --json")).expect(0);
    assert_gone(&machine, &run.last(), true);
    assert_eq!(machine.run(OTHERS).expect(0).stdout, others);
    install(&machine);
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    machine.assert_healthy();
}

#[test]
fn a_broken_machine_is_removed_too_and_what_was_cut_off_is_gone_on_with() {
    let machine = whole("uninstall-broken");
    for (what, broken, by) in [
        ("the daemon hangs", "systemctl kill -s STOP ployz.service", PLOYZD),
        (
            "units are garbage",
            "cd /usr/local/lib/systemd/system && echo garbage >ployz.service && echo x >ployz-deploy.socket && systemctl daemon-reload; true",
            PLOYZD,
        ),
        (
            "records and descriptions are gone",
            "rm -rf /var/lib/ployz-install /usr/local/lib/ployz/installed.json",
            PLOYZD,
        ),
        ("a unit is masked", "systemctl mask ployz.service", PLOYZD),
        ("Docker is stopped", "systemctl stop docker.socket docker.service", PLOYZD),
        (
            "the binary is gone",
            "cp /usr/local/bin/ployzd /usr/local/bin/ployzd.previous; rm /usr/local/bin/ployzd",
            "/usr/local/bin/ployzd.previous",
        ),
    ] {
        machine.run(broken).ok();
        let run = machine.run_within(180, &format!("{by} uninstall --purge --yes --json"));
        assert_eq!(run.code, 0, "{what}: {}", run.shown());
        machine.run("systemctl unmask ployz.service; rm -f /etc/systemd/system/ployz.service; systemctl start docker; docker rm -f ployz-web; true").ok();
        assert_gone(&machine, &run.last(), true);
        note(&format!("{what}: {} removed", run.last()["removed"].as_array().unwrap().len()));
        install(&machine);
    }
    // Killed after so many milliseconds, then typed again.
    for after in [60, 150, 250, 350, 500, 800] {
        // A container that has ended already is not waited for.
        machine.run(&format!("cp {PLOYZD} /root/kept; docker kill ployz-web")).ok();
        let run = machine.start_run("exec /root/kept uninstall --purge --yes --json");
        std::thread::sleep(std::time::Duration::from_millis(after));
        machine.run("pkill -KILL -f '[u]ninstall --purge'; true").ok();
        let ended = run.end().code;
        let left = lines(&machine).len();
        let again = machine.run_within(120, "/root/kept uninstall --purge --yes --json");
        assert_eq!(again.code, 0, "after {after} ms: {}", again.shown());
        assert_gone(&machine, &again.last(), true);
        note(&format!("killed after {after} ms (exit {ended}): {left} things left, then gone"));
        install(&machine);
    }
    // Somebody installs: busy, and everything runs.
    machine.write(
        "/root/hold.py",
        "import fcntl, struct, time\nf = open('/var/lib/ployz-install/admission.lock', 'r+')\n\
        fcntl.fcntl(f, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 1, 0))\ntime.sleep(100)\n",
    );
    let held = machine.start_run("exec python3 /root/hold.py");
    machine.until("it is held", |machine| machine.run(&format!("{PLOYZD} install --docker none")).code == 3);
    let _ = machine.run(&format!("{PLOYZD} uninstall --yes")).expect(3).says(&["python3"]);
    drop(held);
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    machine.assert_healthy();
}
