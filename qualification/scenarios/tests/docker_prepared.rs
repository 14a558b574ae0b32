//! Docker, when an installation is asked to prepare the host: installed where there is none, judged and never changed
//! where there is one, and no affair of any upgrade.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Plan, Run, Server, release, serve};
use serde_json::json;

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// What an upgrade must leave as it is: packages, Docker's processes and files, containers.
const DOCKER: &str = "dpkg-query -W; systemctl show -p MainPID,ExecMainStartTimestampMonotonic,NRestarts docker.service \
    containerd.service; md5sum /etc/docker/* /etc/apt/sources.list.d/* /etc/apt/sources.list; \
    docker ps -a --format '{{.ID}} {{.Names}} {{.CreatedAt}}'; docker inspect -f '{{.State.StartedAt}} {{.State.Pid}}' ployz-web";
/// What would be made before anything is refused.
const TRACES: &str = "ls -A /etc/docker /usr/local/bin /etc/apt/sources.list.d /etc/apt/keyrings 2>/dev/null; \
    cat /etc/docker/daemon.json; dpkg-query -W docker.io; systemctl show -p MainPID,ActiveState docker.service";
/// An image that serves a page, made without a network.
const IMAGE: &str = "mkdir -p /tmp/i/bin /tmp/i/www && cp /usr/bin/busybox /tmp/i/bin/ && ln -sf busybox /tmp/i/bin/sh && \
    echo hello >/tmp/i/www/index.html && \
    tar -C /tmp/i -c . | docker import -c 'CMD [\"/bin/busybox\",\"httpd\",\"-f\",\"-p\",\"8080\",\"-h\",\"/www\"]' - web:1";

fn plan(name: &str, server: &Server) -> Plan {
    // Docker's own packages are looked for, and not to be had here: not for long.
    let deadlines = json!({"pointer": 2, "packages": 240});
    Machine::named(name).served_by(server).setting("deadlines", deadlines)
}

/// The machine's packages come from the lab.
fn with_source(machine: &Machine, server: &Server) {
    let url = server.url();
    machine.write("/etc/apt/sources.list", &format!("deb [trusted=yes] {url}/packages/ ./\n"));
}

fn install(machine: &Machine, options: &str) -> Run {
    let from = machine.deliver(&release("1.4.0"));
    let ployzd =
        from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
    machine.run_within(400, &format!("{ployzd}/ployzd install {from} {options}"))
}

#[test]
fn where_there_is_no_docker_it_is_installed_and_an_upgrade_leaves_it_alone() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("docker-made").release(&old).release(&new).packages().start();
    let machine = plan("docker-made", &server).boot();
    with_source(&machine, &server);
    machine.write("/etc/docker/daemon.json", "{\"registry-mirrors\": [\"https://mirror.test\"]}\n");
    let planned = install(&machine, "--dry-run").expect(0);
    let _ = planned.says(&["Docker", "installed by apt-get"]);
    assert!(machine.run("dpkg-query -W docker.io").code != 0, "a dry run installed it");

    let run = install(&machine, "--json").expect(0);
    let record = run.record();
    assert_eq!(record["outcome"]["succeeded"]["version"], "1.4.0", "{record}");
    let facts: Vec<String> =
        run.events().iter().filter_map(|e| e["fact"].as_str().map(str::to_owned)).collect();
    let told = facts.join("\n");
    for text in
        ["apt-get", "docker.io, docker-cli (the distribution's", "containerd's image store, live-restore"]
    {
        assert!(told.contains(text), "{text}: {told}");
    }
    let info = machine.run("docker info --format '{{.LiveRestoreEnabled}} {{.DriverStatus}}'").expect(0);
    assert_eq!(info.text(), "true [[driver-type io.containerd.snapshotter.v1]]");
    let configured = machine.read("/etc/docker/daemon.json");
    assert!(configured.contains("https://mirror.test"), "another's key is kept: {configured}");
    assert_eq!(machine.run("systemctl is-enabled docker.service").text(), "enabled");

    machine.run(IMAGE).ok();
    machine.run(&format!("{PLOYZD} service deploy web --image web:1 --publish 8080:8080")).ok();
    assert_eq!(machine.run("curl -fsS -m 5 http://127.0.0.1:8080/").text(), "hello");
    let before = machine.run(DOCKER).expect(0).stdout;
    let id = machine.ask_for("1.5.0");
    machine.assert_upgraded(&id, &new);
    assert_eq!(machine.run(DOCKER).expect(0).stdout, before, "an upgrade touched the host's own software");
    // A second installation finds it good and changes nothing of it either.
    machine.run_within(120, &format!("{PLOYZD} install")).ok();
    assert_eq!(machine.run(DOCKER).expect(0).stdout, before);
    machine.reboot();
    machine.until("the service is back", |machine| {
        machine.run("curl -fsS -m 2 http://127.0.0.1:8080/").text() == "hello"
    });
}

#[test]
fn a_package_lock_is_waited_for_and_its_holder_named() {
    let server = serve("docker-lock").packages().start();
    let machine =
        plan("docker-lock", &server).setting("deadlines", json!({"pointer": 2, "packages": 4})).boot();
    with_source(&machine, &server);
    let hold = |seconds: u32| {
        let script = format!(
            "import fcntl,time\nf=open(\"/var/lib/dpkg/lock-frontend\",\"w\")\nfcntl.lockf(f,fcntl.LOCK_EX)\ntime.sleep({seconds})\n"
        );
        machine.write("/root/hold.py", &script);
        let held = machine.start_run("exec python3 /root/hold.py");
        machine.until("it is held", |machine| machine.run("grep -c POSIX /proc/locks").text() != "0");
        held
    };
    let held = hold(60);
    let run = install(&machine, "--json").expect(4);
    let failed = run.outcome()["failed"].clone();
    assert_eq!((&failed["stage"], &failed["reason"]), (&"preparing".into(), &"docker".into()), "{failed}");
    let error = failed["error"].to_string();
    assert!(error.contains("python3 /root/hold.py") && error.contains("lock-frontend"), "{error}");
    assert!(error.contains("nothing was ended"), "{error}");
    assert!(!error.contains("could not be put back"), "{error}");
    assert_eq!(machine.run("ls -A /etc/docker").text(), "", "daemon.json is gone again");
    assert_eq!(run.record()["installation"], "unchanged");
    drop(held);
    machine.run("pkill -f '[h]old.py'; true").ok();
    // One that ends is waited for.
    machine.write(
        "/etc/ployz/install.json",
        &json!({
            "schema": 1, "confirm_window": 1, "deadlines": {"pointer": 2, "packages": 240},
        })
        .to_string(),
    );
    let _held = hold(6);
    let run = install(&machine, "--json").expect(0);
    let waited =
        run.events().iter().any(|e| e["fact"].as_str().is_some_and(|f| f.starts_with("waiting for process")));
    assert!(waited, "{}", run.shown());
    machine.run("docker info").ok();
}

#[test]
fn what_can_not_be_installed_is_failed_by_its_last_words_and_leaves_nothing_half_made() {
    let server = serve("docker-broken").packages().start();
    let machine = plan("docker-broken", &server).boot();
    with_source(&machine, &server);
    // The package comes cut in half.
    server.rules(&json!([{"path": "*docker.io*", "cut": {"after": 100_000, "how": "reset"}}]));
    let run = install(&machine, "--json").expect(4);
    let error = run.outcome()["failed"]["error"].to_string();
    assert!(error.contains("apt-get") && error.contains("docker.io"), "{error}");
    assert!(error.contains("exited with status 100"), "{error}");
    assert_eq!(machine.run("ls -A /etc/docker /usr/local/bin").text(), "/etc/docker:\n\n/usr/local/bin:");
    server.obey();
    install(&machine, "").ok();
    machine.run("docker info").ok();
}

#[test]
fn a_docker_that_is_there_is_judged_by_name_and_never_touched() {
    let store = "{\"live-restore\": true, \"features\": {\"containerd-snapshotter\": true}}\n";
    let machine = Machine::named("docker-judged").image(Image::TrixieDocker).boot();
    let refused = |machine: &Machine, what: &str, words: &[&str]| {
        let before = machine.run(TRACES).stdout;
        let run = install(machine, "").expect(4).says(words);
        assert_eq!(machine.run(TRACES).stdout, before, "{what}: {}", run.shown());
        assert_eq!(machine.run("ls -A /usr/local/bin").text(), "", "{what}");
    };
    refused(
        &machine,
        "stopped",
        &["installed and not running", "systemctl start docker.service", "Nothing was installed"],
    );
    machine.run("systemctl start docker.service").ok();
    refused(
        &machine,
        "without the store",
        &["keeps images in its own store (overlay2)", "containerd-snapshotter"],
    );
    machine.write("/etc/docker/daemon.json", store);
    machine.run("systemctl restart docker.service").ok();
    let before = machine.run(TRACES).stdout;
    install(&machine, "").ok();
    let after = machine.run(TRACES).stdout;
    assert_eq!(
        before.lines().filter(|line| !line.contains("ployzd")).collect::<Vec<_>>(),
        after.lines().filter(|line| !line.contains("ployzd")).collect::<Vec<_>>(),
        "Docker was touched"
    );

    let old = Machine::named("docker-old").image(Image::Bookworm).boot();
    old.run("systemctl start docker.service").ok();
    refused(&old, "Debian 12's", &["too old (API 1.41)", "Engine 25"]);

    let broken = Machine::named("docker-json").boot();
    for (what, text, words) in [
        ("not JSON", "{\"debug\": tru", "is not a JSON object"),
        ("another store", "{\"storage-driver\": \"overlay2\"}", "storage-driver"),
        ("a list", "[]", "is not a JSON object"),
    ] {
        broken.write("/etc/docker/daemon.json", text);
        refused(&broken, what, &["/etc/docker/daemon.json", words]);
    }
    broken.run("rm -r /etc/docker && mv /usr/bin/apt-get /usr/bin/apt-get.away").ok();
    refused(&broken, "no package manager", &["no apt-get", "--docker none"]);
    broken.run("mv /usr/bin/apt-get.away /usr/bin/apt-get").ok();
    broken.run("sed -i 's/^ID=.*/ID=slackware/; s/^VERSION_ID=.*/VERSION_ID=15/' /etc/os-release").ok();
    refused(&broken, "an unknown distribution", &["slackware 15", "--docker none"]);
}
