//! Images that are pulled for a service, from a registry that is slow, broken, down or silent: what comes is told as it
//! comes, what fails is named, and what served goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::{Duration, Instant};

use scenarios::{Image, Machine, Pullable, Run, Server, note, release, serve};
use serde_json::{Value, json};

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// What is published everywhere here.
const WEB: &str = "web --publish 8080:8080 --image";

/// A registry of `app:1` and `app:2`.
fn registry(name: &str) -> Server {
    serve(name)
        .release(&release("1.4.0"))
        .release(&release("1.5.0"))
        .image(Pullable::new("app", "1"))
        .image(Pullable::new("app", "2"))
        .start()
}

/// A machine with 1.4.0, a Docker that is used, and `web:1` as service `web` at port 8080.
fn prepared(name: &str, server: &Server) -> Machine {
    let machine = Machine::named(name).image(Image::TrixieDocker).served_by(server).boot();
    machine.start_docker();
    machine.install_with_docker(&release("1.4.0")).ok();
    deploy(&machine, &format!("{WEB} web:1")).ok();
    machine
}

fn deploy(machine: &Machine, words: &str) -> Run {
    machine.run_within(150, &format!("{PLOYZD} service deploy {words}"))
}

fn page(machine: &Machine) -> String {
    machine.run("curl -sS -m 5 http://127.0.0.1:8080/").text().to_owned()
}

/// About 1.5 MB a second of every blob.
fn slowly() -> Value {
    json!([{"path": "/v2/*/blobs/*", "drip": {"bytes": 150_000, "every_ms": 100}}])
}

/// Waits until a blob is being fetched.
fn until_it_is_pulled(machine: &Machine, server: &Server) {
    machine.until("a blob is being fetched", |_| server.asked().iter().any(|path| path.contains("/blobs/")));
}

#[test]
fn a_pull_is_told_as_it_comes_and_one_that_fails_is_named_and_changes_nothing() {
    let mut server = registry("pull");
    let expired = serve("pull-expired").certificate("expired").image(Pullable::new("app", "1")).start();
    let machine = prepared("pull", &server);
    server.rules(&slowly());
    let run = deploy(&machine, &format!("{WEB} {} --json", server.image("app:1"))).expect(0);
    let events = run.events();
    let pulling = events.iter().filter(|event| event["progress"]["stage"] == "pulling");
    let told: Vec<(u64, u64)> = pulling
        .filter_map(|event| {
            Some((event["progress"]["bytes"].as_u64()?, event["progress"]["total"].as_u64()?))
        })
        .collect();
    note(&format!("progress of a pull: {told:?}"));
    assert!(told.len() >= 5, "{told:?}");
    assert!(told.is_sorted_by_key(|(bytes, _)| *bytes), "it went back: {told:?}");
    assert!(told.iter().any(|(bytes, total)| bytes < total && *total > 8_000_000), "{told:?}");
    assert!(told.iter().all(|(bytes, total)| bytes <= total), "{told:?}");
    assert_eq!(page(&machine), "page of app:1");
    server.obey();

    let unchanged = machine.watch_docker();
    let traffic = machine.traffic("ployz-web");
    let address = machine.run("ip -4 -br addr show eth0 | awk '{sub(\"/.*\",\"\",$3); print $3}'");
    let published = machine.traffic_at("published", address.text(), 8080);
    let app = server.image("app:2");
    let layer = "/v2/app/blobs/*";
    let mut table = String::new();
    let mut fails = |what: &str, image: &str, words: &[&str]| {
        let started = Instant::now();
        let run = deploy(&machine, &format!("{WEB} {image}")).expect(4);
        let error = run.stderr.lines().next().unwrap_or_default().to_owned();
        table += &format!("\n{what:<28} {:>5.1} s  {error}", started.elapsed().as_secs_f32());
        let run = run.says(&["can't be pulled", "Now: nothing of the service was changed."]);
        assert!(words.iter().any(|word| run.both().contains(word)), "{what}: {}", run.shown());
        assert!(run.both().contains(&format!("try it by hand: docker pull {image}")), "{}", run.shown());
        assert_eq!(page(&machine), "page of app:1", "{what}");
        assert_eq!(machine.containers("web"), ["ployz-web running"], "{what}");
        assert_eq!(machine.api()["admission"]["state"], "free", "{what}");
        unchanged.assert_same(&machine.watch_docker());
    };
    fails("no such image", &server.image("none:1"), &["not found"]);
    fails("no such tag", &server.image("app:9"), &["not found"]);
    fails("no such host", "nowhere.ployz.test/app:1", &["no such host", "server misbehaving", "lookup"]);
    fails("an expired certificate", &expired.image("app:1"), &["certificate has expired"]);
    server.rules(&json!([{"path": "/v2/app/manifests/*", "status": 401}]));
    fails("not permitted", &app, &["401", "authorization"]);
    server.rules(&json!([{"path": "/v2/app/manifests/*", "status": 503}]));
    fails("the registry is ill", &app, &["503", "Service Unavailable"]);
    server.rules(&json!([{"path": "/v2/app/manifests/*", "body": "<html>\u{1b}[31mhello</html>"}]));
    fails("a page instead", &app, &["invalid", "unexpected", "unsupported", "not found", "failed"]);
    server.rules(&json!([{"path": layer, "flip": 1000}]));
    fails("a wrong byte", &app, &["digest", "checksum"]);
    server.rules(&json!([{"path": layer, "status": 404}]));
    fails("a layer that is not there", &app, &["not found"]);
    server.rules(&json!([{"path": layer, "cut": {"after": 50_000, "how": "reset"}}]));
    fails("cut off each time", &app, &["reset", "EOF"]);
    server.stop();
    fails("the registry is down", &app, &["connection refused"]);
    note(&format!("pulls that fail:{table}"));
    for traffic in [traffic, published] {
        let served = machine.served(&traffic);
        assert!(served.asked > 50 && served.failed == 0, "{served:?}");
    }
    machine.assert_healthy();
}

#[test]
fn what_is_being_pulled_is_deployed_though_its_asker_and_the_daemon_go() {
    let server = registry("pull-goes-on");
    let machine = prepared("pull-goes-on", &server);
    let other = machine.run("docker run -d --name other web:2").expect(0);
    let traffic = machine.traffic("other");
    for (what, command) in [
        ("the client is killed", "pkill -KILL -f '[p]loyzd service deploy'"),
        ("the daemon is restarted", "systemctl restart ployz.service"),
    ] {
        let (before, tag) = match page(&machine).as_str() {
            "page of app:1" => ("page of app:1", "2"),
            page => (if page == "page 1" { "page 1" } else { "page of app:2" }, "1"),
        };
        let image = server.image(&format!("app:{tag}"));
        // Not here any more, and nothing of it.
        machine.run(&format!("docker rmi {image} 2>/dev/null; docker image prune -f >/dev/null")).ok();
        server.forget();
        server.rules(&slowly());
        let asked = machine.start_run(&format!("exec {PLOYZD} service deploy {WEB} {image}"));
        until_it_is_pulled(&machine, &server);
        machine.run(command).ok();
        let left = asked.end();
        assert_ne!(left.code, 0, "{what}: {}", left.shown());
        // It is named to whoever wants to change the Machine, by a daemon that did not ask for it, too.
        let busy = deploy(&machine, "db --image web:1").expect(3);
        let _ = busy.says(&["deploying web since"]);
        assert_eq!(page(&machine), before, "{what}: the old one serves while the new one is pulled");
        let started = Instant::now();
        machine.until("it is finished all the same", |machine| {
            page(machine) == format!("page of app:{tag}")
                && machine.containers("web") == ["ployz-web running"]
        });
        note(&format!(
            "{what}: exit {}, deployed {:.1} s later; {}",
            left.code,
            started.elapsed().as_secs_f32(),
            left.both().lines().last().unwrap_or_default()
        ));
        machine.until("nobody deploys any more", |machine| machine.api()["admission"]["state"] == "free");
    }
    let served = machine.served(&traffic);
    assert!(served.asked > 50 && served.failed == 0, "{served:?}");
    assert_eq!(machine.run("docker inspect -f '{{.Id}}' other").text(), other.text());
    machine.assert_healthy();
}

#[test]
fn a_registry_that_falls_silent_is_given_up_and_never_holds_anyone_out() {
    let server = registry("pull-silent");
    let machine = prepared("pull-silent", &server);
    server.rules(&json!([{"path": "/v2/*/blobs/*", "cut": {"after": 3_000_000, "how": "stall"}}]));
    let unchanged = machine.watch_docker();
    let started = Instant::now();
    let asked = machine.start_run(&format!("exec {PLOYZD} service deploy {WEB} {}", server.image("app:1")));
    until_it_is_pulled(&machine, &server);
    let mut looks = 0;
    while machine.api()["admission"]["state"] != "free" {
        for path in ["machine", "services", "upgrades"] {
            let url = format!("http://machine/v1/{path}");
            machine.run(&format!("curl -fsS -m 5 --unix-socket /run/ployz/ployz.sock {url}")).ok();
        }
        if started.elapsed() < Duration::from_secs(50) {
            let _ = deploy(&machine, "db --image web:1").expect(3).says(&["deploying web since"]);
        }
        assert!(started.elapsed() < Duration::from_secs(100), "it is not given up");
        std::thread::sleep(Duration::from_secs(2));
        looks += 1;
    }
    let took = started.elapsed().as_secs();
    let run =
        asked.end().expect(4).says(&["nothing of it came for 60 s", "nothing of the service was changed"]);
    note(&format!("a silent registry is given up after {took} s and {looks} looks: {}", run.stderr.trim()));
    assert!((60..90).contains(&took), "{took} s");
    unchanged.assert_same(&machine.watch_docker());
    assert_eq!(page(&machine), "page 1");
    server.obey();
    deploy(&machine, &format!("{WEB} {}", server.image("app:1"))).ok();
    assert_eq!(page(&machine), "page of app:1");
    machine.assert_healthy();
}

#[test]
fn a_deploy_that_hangs_and_one_that_never_ends_asking_keep_nobody_from_going_back() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = registry("pull-recover");
    let machine = prepared("pull-recover", &server);
    let id = machine.ask_for("1.5.0");
    machine.assert_upgraded(&id, &new);
    let unchanged = machine.watch_docker();
    let traffic = machine.traffic("ployz-web");
    let recover = "/usr/local/bin/ployzd.previous recover --yes --json";

    server.rules(&json!([{"path": "/v2/*/blobs/*", "cut": {"after": 100_000, "how": "stall"}}]));
    let asked = machine.start_run(&format!("exec {PLOYZD} service deploy {WEB} {}", server.image("app:1")));
    until_it_is_pulled(&machine, &server);
    // Who only installs is told who is in the way.
    let install = machine.run(&format!("{PLOYZD} install --version 1.4.0")).expect(3);
    let _ = install.says(&["deploying web since"]);
    let run = machine.run_within(90, recover).expect(0);
    assert_eq!(run.outcome()["succeeded"]["version"], "1.4.0", "{}", run.shown());
    note(&format!("recovered over a Deploy that hangs in {:.1} s", run.took.as_secs_f32()));
    let left = asked.end();
    assert_ne!(left.code, 0, "{}", left.shown());
    note(&format!("its asker: exit {} {}", left.code, left.both().lines().last().unwrap_or_default()));
    machine.assert_runs("1.4.0", &old.sha256);
    unchanged.assert_same(&machine.watch_docker());
    let served = machine.served(&traffic);
    assert!(served.asked > 100 && served.failed == 0, "{served:?}");
    server.obey();
    deploy(&machine, "db --image web:1").ok();

    // Docker itself hangs in the middle of one.
    let hung = machine.start_run(&format!("exec {PLOYZD} service deploy {WEB} web:2"));
    machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
    machine.run("systemctl kill -s STOP docker.service").ok();
    let run = machine.run_within(120, recover).expect(0);
    note(&format!("recovered over a Docker that hangs in {:.1} s", run.took.as_secs_f32()));
    machine.assert_runs("1.5.0", &new.sha256);
    machine.run("systemctl kill -s CONT docker.service").ok();
    drop(hung);
    machine.until("exactly one serves", |machine| {
        machine.containers("web") == ["ployz-web running"] && page(machine) == "page 1"
    });

    machine.run("useradd -m alice && usermod -a -G ployz alice").ok();
    let health = "--health-command true --health-interval 1";
    let on = format!(
        "until [ -e /tmp/enough ]; do for n in 1 2; do {PLOYZD} service deploy db --image web:$n {health}; done; done"
    );
    let loops: Vec<_> =
        (0..3).map(|_| machine.start_run(&format!("exec runuser -u alice -- sh -c '{on}'"))).collect();
    machine.until("they deploy", |machine| machine.containers("db").len() == 2);
    let run = machine.run_within(90, recover).expect(0);
    assert_eq!(run.outcome()["succeeded"]["version"], "1.4.0", "{}", run.shown());
    note(&format!("recovered over Deploys in a loop in {:.1} s", run.took.as_secs_f32()));
    machine.run("touch /tmp/enough; chmod 644 /tmp/enough").ok();
    let heard: Vec<Run> = loops.into_iter().map(scenarios::Background::end).collect();
    let busy = heard.iter().map(|run| run.stderr.matches("busy: ").count()).sum::<usize>();
    assert!(busy > 10, "the loops were {busy} times busy");
    machine.until("nobody deploys any more", |machine| machine.api()["admission"]["state"] == "free");
    machine.assert_runs("1.4.0", &old.sha256);
    assert_eq!(machine.containers("db"), ["ployz-db running"]);
    assert_eq!(page(&machine), "page 1");
    machine.assert_nothing_left();
    machine.assert_healthy();
}
