//! Services: real containers through the deploy door. What is deployed works, what does not work leaves what served, and
//! Deploys and installations exclude each other.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Instant;

use scenarios::{Image, Machine, Run, hold, note, release, serve};
use serde_json::json;

const PLOYZD: &str = "/usr/local/bin/ployzd";

/// A machine with 1.4.0 and a Docker that is used.
fn prepared(name: &str) -> Machine {
    let machine = Machine::named(name).image(Image::TrixieDocker).boot();
    machine.start_docker();
    let from = machine.deliver(&release("1.4.0"));
    let ployzd =
        from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
    machine.run(&format!("{ployzd}/ployzd install {from}")).ok();
    machine
}

fn deploy(machine: &Machine, words: &str) -> Run {
    machine.run_within(120, &format!("{PLOYZD} service deploy {words}"))
}

fn page(machine: &Machine) -> String {
    machine.run("curl -sS -m 5 http://127.0.0.1:8080/").text().to_owned()
}

#[test]
fn a_service_is_deployed_replaced_and_removed_and_what_does_not_work_leaves_what_served() {
    let machine = prepared("services");
    machine.run("useradd -m alice && usermod -a -G ployz alice").ok();
    // Neither the daemon nor who may use it is in group docker.
    assert_eq!(machine.run("getent group docker | cut -d: -f4").text(), "ployz-deploy");
    let web = "web --publish 8080:8080 --volume data:/data --env GREETING=hello --restart always";
    let run =
        machine.run_as("alice", &format!("{PLOYZD} service deploy {web} --image web:1 --json")).expect(0);
    assert!(run.last()["done"]["container"].is_string(), "{}", run.shown());
    assert_eq!(page(&machine), "page 1");
    let inspect = |what: &str| {
        machine.run(&format!("docker inspect -f '{what}' ployz-web")).expect(0).text().to_owned()
    };
    assert!(inspect("{{.Config.Env}}").contains("GREETING=hello"));
    assert_eq!(inspect("{{.HostConfig.RestartPolicy.Name}}"), "always");
    assert_eq!(
        inspect("{{.HostConfig.Privileged}} {{.HostConfig.CapAdd}} {{.HostConfig.Binds}}"),
        "false [] []"
    );
    machine.run("docker exec ployz-web /bin/sh -c 'echo kept >/data/file'").ok();

    let first = inspect("{{.Id}}");
    let again = deploy(&machine, &format!("{web} --image web:1")).expect(0);
    let _ = again.says(&["Nothing was needed"]);
    assert_eq!(inspect("{{.Id}}"), first);
    deploy(&machine, &format!("{web} --image web:2")).ok();
    assert_eq!(
        (page(&machine).as_str(), machine.containers("web")),
        ("page 2", vec!["ployz-web running".to_owned()])
    );
    assert_eq!(machine.run("docker exec ployz-web busybox cat /data/file").text(), "kept");

    // Whatever does not work: the one that served serves again, with the policy that it had.
    for (what, words, said) in [
        ("ends at once", "--image exits:1", "exited with status 3; it said: boom"),
        (
            "is not healthy",
            "--image web:1 --health-command false --health-interval 1 --health-retries 2",
            "not healthy",
        ),
        ("can't start", "--image web:1 -- /no/such/program", "does not start"),
        ("is not here", "--image nowhere:1 --pull never", "is not to be pulled"),
        ("can't be pulled", "--image 127.0.0.1:9/nowhere:1", "can't be pulled"),
        ("a port of another", "--image web:1 --publish 22:8080", "port 22/tcp is held by a process of uid 0"),
    ] {
        let run = deploy(&machine, &format!("{web} {words}")).expect(4).says(&[said]);
        assert!(
            run.both().contains("Now: the old container serves again")
                || run.both().contains("Now: nothing of the service was changed"),
            "{what}: {}",
            run.shown()
        );
        assert_eq!(page(&machine), "page 2", "{what}");
        assert_eq!(machine.containers("web"), ["ployz-web running"], "{what}");
        assert_eq!(inspect("{{.HostConfig.RestartPolicy.Name}}"), "always", "{what}");
    }
    let other = deploy(&machine, "other --image web:1 --publish 8080:8080").expect(4);
    let _ = other.says(&["port 8080/tcp is held by container ployz-web", "ss -ltnup"]);
    let health =
        "healthy --image web:1 --health-command 'busybox wget -q -O - 127.0.0.1:8080' --health-interval 1";
    deploy(&machine, health).ok();
    machine.run(&format!("{PLOYZD} machine initialize --name m")).ok();
    let listed = machine.run(&format!("{PLOYZD} service list")).expect(0);
    let _ = listed.says(&["healthy", "web", "8080→8080/tcp", "web:2"]);
    let status = machine.api();
    assert_eq!(status["docker"]["state"], "running", "{status}");

    machine.reboot();
    machine.run("systemctl start docker.service").ok();
    machine.until("the service is back after a boot", |machine| page(machine) == "page 2");
    let removed = machine.run_within(60, &format!("{PLOYZD} service remove web")).expect(0);
    let _ = removed.says(&["web is removed", "kept: volumes data"]);
    assert_eq!(machine.containers("web"), Vec::<String>::new());
    assert_eq!(machine.run("docker volume ls -q").text(), "data");
    let _ = machine.run(&format!("{PLOYZD} service remove web")).expect(4).says(&["there is no service web"]);
    // A reset takes the services with it, or says why it can't and changes nothing.
    machine.run("systemctl stop docker.socket docker.service").ok();
    let refused = machine.run(&format!("{PLOYZD} machine reset --yes"));
    assert!(refused.code != 0 && machine.api()["name"] == "m", "{}", refused.shown());
    machine.run("systemctl start docker.service").ok();
    machine.run_within(60, &format!("{PLOYZD} machine reset --yes")).ok();
    assert_eq!(
        (machine.api()["phase"].clone(), machine.containers("healthy")),
        (json!("uninitialized"), vec![])
    );
    assert_eq!(machine.run("docker volume ls -q").text(), "data");
    machine.assert_healthy();
}

#[test]
fn what_was_admitted_is_finished_and_after_any_crash_exactly_one_container_runs() {
    let machine = prepared("service-crash");
    deploy(&machine, "web --image web:1 --publish 8080:8080").ok();
    // The asker leaves, and the daemon is replaced, in the middle: the old container takes ten seconds to stop.
    for (what, command) in [
        ("the client is killed", "pkill -KILL -f '[p]loyzd service deploy'"),
        ("the daemon is killed", "systemctl kill -s KILL ployz.service"),
        ("the daemon is restarted", "systemctl restart ployz.service"),
    ] {
        let before = page(&machine);
        let image = if before == "page 1" { "web:2" } else { "web:1" };
        let asked = machine
            .start_run(&format!("exec {PLOYZD} service deploy web --image {image} --publish 8080:8080"));
        machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
        machine.run(command).ok();
        let seen = machine.run(&format!("{PLOYZD} install --docker none")).expect(3);
        let _ = seen.says(&["deploying web since", "ployz-deploy@"]);
        let left = asked.end();
        note(&format!("{what}: exit {} {}", left.code, left.both().lines().last().unwrap_or_default()));
        assert_ne!(left.code, 0, "{what}: done was said of what was not seen");
        machine.until("it is finished all the same", |machine| {
            machine.containers("web") == ["ployz-web running"]
                && page(machine) != before
                && !page(machine).is_empty()
        });
    }
    // The worker is killed, stopped, or the power goes, with the old container stopped and the new one not yet seen to work.
    for (what, state) in [
        ("SIGKILL while the old one stops", 2),
        ("SIGTERM while the old one stops", 2),
        ("SIGKILL while the new one is watched", 1),
        ("power loss while the old one stops", 2),
        ("power loss while the new one is watched", 1),
    ] {
        let before = page(&machine);
        let image = if before == "page 1" { "web:2" } else { "web:1" };
        let health = "--health-command 'busybox sleep 2' --health-interval 1 --health-start 30";
        let words = format!("exec {PLOYZD} service deploy web --image {image} --publish 8080:8080 {health}");
        let asked = machine.start_run(&words);
        machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
        if state == 1 {
            machine.until("the new one runs", |machine| {
                machine.containers("web").iter().any(|line| line == "ployz-web.next running")
            });
        }
        match what.split(' ').next() {
            Some("SIGKILL") => machine.run("systemctl kill -s KILL 'ployz-deploy@*.service'").ok(),
            Some("SIGTERM") => machine.run("systemctl stop 'ployz-deploy@*.service'").ok(),
            _ => {
                machine.lose_power();
                machine.run("systemctl start docker.service").ok();
            }
        }
        drop(asked);
        let started = Instant::now();
        machine.until("the old one serves alone", |machine| {
            machine.containers("web") == ["ployz-web running"] && page(machine) == before
        });
        let policy =
            machine.run("docker inspect -f '{{.HostConfig.RestartPolicy.Name}}' ployz-web").text().to_owned();
        note(&format!("{what}: {before} again after {:.1} s", started.elapsed().as_secs_f32()));
        machine.until("it has its policy again", |machine| {
            machine.run("docker inspect -f '{{.HostConfig.RestartPolicy.Name}}' ployz-web").text()
                == "unless-stopped"
        });
        assert!(["unless-stopped", "always"].contains(&policy.as_str()), "{policy}");
    }
    machine.assert_healthy();
}

#[test]
fn deploys_and_upgrades_exclude_each_other_by_name_and_reads_are_always_answered() {
    let new = release("1.5.0");
    let server = serve("service-busy").release(&release("1.4.0")).release(&new).start();
    let machine = prepared("service-busy");
    machine.write(
        "/etc/ployz/install.json",
        &json!({
            "schema": 1, "confirm_window": 1, "channels": server.url(),
            "releases": format!("{}/releases/download", server.url()),
        })
        .to_string(),
    );
    deploy(&machine, "web --image web:1").ok();
    let read = |machine: &Machine, what: &str| {
        for path in ["machine", "services", "upgrades"] {
            let url = format!("http://machine/v1/{path}");
            let run = machine.run(&format!("curl -fsS -m 10 --unix-socket /run/ployz/ployz.sock {url}"));
            assert_eq!(run.code, 0, "{what}: {}", run.shown());
        }
    };
    // A Deploy under way.
    let deploying = machine.start_run(&format!("exec {PLOYZD} service deploy web --image web:2"));
    machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
    let _ = machine
        .run(&format!("{PLOYZD} upgrade --version 1.5.0"))
        .expect(3)
        .says(&["deploying web since", "Nothing was accepted"]);
    let _ = machine
        .run(&format!("{PLOYZD} install --version 1.5.0 --docker none"))
        .expect(3)
        .says(&["deploying web since"]);
    let _ = deploy(&machine, "db --image web:1").expect(3).says(&["deploying web since"]);
    let _ = machine.run(&format!("{PLOYZD} status")).both();
    assert_eq!(machine.api()["admission"]["what"], "deploying web");
    read(&machine, "while deploying");
    deploying.end().ok();
    // An upgrade under way.
    let id = machine.ask_and_hold(&server, "1.5.0");
    let busy = deploy(&machine, "web --image web:1").expect(3);
    let _ = busy.says(&[&id, "at acquiring"]);
    let _ = machine.run(&format!("{PLOYZD} service remove web")).expect(3).says(&["at acquiring"]);
    read(&machine, "while upgrading");
    server.obey();
    machine.assert_upgraded(&id, &new);
    deploy(&machine, "web --image web:1").ok();
    hold(&server);
    server.obey();
}

#[test]
fn whatever_is_wrong_with_docker_is_named_in_time_and_the_machine_api_answers_meanwhile() {
    let machine = prepared("service-docker");
    deploy(&machine, "web --image web:1 --publish 8080:8080").ok();
    let named = |what: &str, words: &[&str]| {
        for command in ["service list", "service deploy web --image web:2", "service deploy db --image web:1"]
        {
            let started = Instant::now();
            let run = machine.run_within(60, &format!("{PLOYZD} {command}")).says(words);
            assert!([4, 6].contains(&run.code), "{what}: {}", run.shown());
            assert!(started.elapsed().as_secs() < 35, "{what}: {command} took {:?}", started.elapsed());
        }
        assert_eq!(machine.api()["ready"], true, "{what}");
    };
    machine.run("systemctl kill -s STOP docker.service").ok();
    named("hanging", &["did not answer", "systemctl status docker.service"]);
    machine.run("systemctl kill -s CONT docker.service").ok();
    machine.until("Docker answers", |machine| machine.run("timeout 5 docker info").code == 0);
    machine.run("systemctl stop docker.socket docker.service").ok();
    named("stopped", &["systemctl start docker.service"]);
    assert_eq!(machine.run("systemctl is-active docker.service").text(), "inactive", "it was woken");
    machine.until("it is seen by the daemon", |machine| {
        machine.api()["docker"]["state"] == "stopped" || machine.api()["docker"]["state"] == "absent"
    });
    // Another store: nothing is concluded from what is not in it.
    machine.write(
        "/etc/docker/daemon.json",
        "{\"live-restore\": true, \"features\": {\"containerd-snapshotter\": false}}\n",
    );
    machine.run("systemctl start docker.service").ok();
    named(
        "another store",
        &["this is not the Docker on which web was deployed", "storage driver was overlayfs"],
    );
    machine.write(
        "/etc/docker/daemon.json",
        "{\"live-restore\": true, \"features\": {\"containerd-snapshotter\": true}}\n",
    );
    machine.run("systemctl restart docker.service").ok();
    // The other store has cut its network off.
    machine.run("docker restart -t 1 ployz-web").ok();
    machine.until("it serves", |machine| page(machine) == "page 1");
    // Not in the group any more.
    machine.run("gpasswd -d ployz-deploy docker").ok();
    named("not permitted", &["may not ask Docker", "install --docker auto"]);
    machine.run(&format!("{PLOYZD} install")).ok();
    // In the middle of a Deploy: the old container serves when Docker is back.
    let deploying =
        machine.start_run(&format!("exec {PLOYZD} service deploy web --image web:2 --publish 8080:8080"));
    machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
    machine.run("systemctl kill -s KILL docker.service").ok();
    let run = deploying.end();
    note(&format!(
        "Docker killed in the middle: exit {} {}",
        run.code,
        run.both().lines().last().unwrap_or_default()
    ));
    machine.until("exactly one serves", |machine| {
        machine.containers("web") == ["ployz-web running"] && page(machine).starts_with("page")
    });
    let without = Machine::named("service-none").installed("1.4.0").boot();
    for command in ["service list", "service deploy web --image web:1"] {
        let _ = without
            .run(&format!("{PLOYZD} {command}"))
            .expect(4)
            .says(&["there is no Docker", "--docker auto"]);
    }
}
