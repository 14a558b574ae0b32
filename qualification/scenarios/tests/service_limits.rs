//! Services where something is scarce or taken: disks that are full, ports that others have, requests that are too much.
//! What is in the way is named before anything stops, and nothing of a Deploy that failed stays.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Pullable, Run, note, release, serve};
use serde_json::{Value, json};

const PLOYZD: &str = "/usr/local/bin/ployzd";

fn deploy(machine: &Machine, words: &str) -> Run {
    machine.run_within(150, &format!("{PLOYZD} service deploy {words}"))
}

fn page(machine: &Machine, at: &str) -> String {
    machine.run(&format!("curl -sS -m 5 http://{at}/")).text().to_owned()
}

#[test]
fn a_full_disk_is_named_and_nothing_of_the_deploy_stays() {
    let large = Pullable { name: "large", tag: "1", mib: 1, unpacked: 300 };
    let server = serve("service-disk").image(large).image(Pullable::new("app", "1")).start();
    let machine = Machine::named("service-disk").image(Image::TrixieDocker).served_by(&server).boot();
    // All that Docker has here: 96 MiB for images, 24 MiB for what it knows of containers.
    for (path, size) in [("containerd", "96m"), ("docker", "24m")] {
        let mount = format!("mount -t tmpfs -o size={size},mode=0711 tmpfs /var/lib/{path}");
        machine.run(&format!("mkdir -p /var/lib/{path} && {mount}")).ok();
    }
    machine.start_docker();
    machine.install_with_docker(&release("1.4.0")).ok();
    deploy(&machine, "web --image web:1 --publish 8080:8080").ok();
    let traffic = machine.traffic("ployz-web");
    let unchanged = machine.watch_docker();
    let fails = |what: &str, words: &str, said: &[&str]| {
        let run = deploy(&machine, words).expect(4).says(said);
        let _ = run.clone().says(&["Now: nothing of the service was changed."]);
        note(&format!("{what}: {}", run.stderr.lines().next().unwrap_or_default()));
        unchanged.assert_same(&machine.watch_docker());
    };
    let web = "web --publish 8080:8080 --volume data:/data --image";
    let image = server.image("large:1");
    fails(
        "an image that is larger than the disk",
        &format!("{web} {image}"),
        &["can't be pulled", "no space left on device"],
    );
    let fill = |path: &str| {
        machine.run(&format!("head -c 200M /dev/zero >{path}/filler 2>/dev/null; true")).ok();
    };
    fill("/var/lib/containerd");
    let image = server.image("app:1");
    fails(
        "an image, on a full disk",
        &format!("{web} {image}"),
        &["can't be pulled", "no space left on device"],
    );
    machine.run("rm /var/lib/containerd/filler").ok();
    fill("/var/lib/docker");
    fails("a container, on a full disk", &format!("{web} web:2"), &["no space left on device"]);
    machine.run("rm /var/lib/docker/filler").ok();
    assert_eq!(page(&machine, "127.0.0.1:8080"), "page 1");
    deploy(&machine, &format!("other --image {image}")).ok();
    machine.run_within(60, &format!("{PLOYZD} service remove other")).ok();

    // The worker's own directory: it can't write what it begins.
    let mount =
        "mount -t tmpfs -o size=64k,mode=0700,uid=$(id -u ployz-deploy),gid=$(id -g ployz-deploy) tmpfs";
    machine.run(&format!("{mount} /var/lib/ployz-deploy")).ok();
    fill("/var/lib/ployz-deploy");
    fails(
        "the worker's directory is full",
        &format!("{web} web:2"),
        &["writing what is begun", "No space left on device", "df -h /var/lib/ployz-deploy"],
    );
    machine.run("umount /var/lib/ployz-deploy").ok();
    let served = machine.served(&traffic);
    assert!(served.asked > 50 && served.failed == 0, "{served:?}");
    deploy(&machine, &format!("{web} web:2")).ok();
    assert_eq!(page(&machine, "127.0.0.1:8080"), "page 2");
    machine.assert_healthy();
}

#[test]
fn who_has_a_port_is_named_by_protocol_and_address_before_anything_stops() {
    let machine = Machine::named("service-ports").image(Image::TrixieDocker).boot();
    machine.start_docker();
    machine.install_with_docker(&release("1.4.0")).ok();
    let address = machine.run("ip -4 -br addr show eth0 | awk '{sub(\"/.*\",\"\",$3); print $3}'").expect(0);
    let address = address.text();
    let image = "--image web:1 --publish";
    deploy(&machine, &format!("one {image} 127.0.0.1:9000:8080 --publish 9000:9000/udp")).ok();
    deploy(&machine, &format!("two {image} {address}:9000:8080")).ok();
    assert_eq!(page(&machine, "127.0.0.1:9000"), "page 1");
    assert_eq!(page(&machine, &format!("{address}:9000")), "page 1");
    let hold = |unit: &str, kind: &str, family: &str, at: &str, port: u16| {
        let listen = if kind == "STREAM" { "; s.listen()" } else { "" };
        let program = format!(
            "import socket, time; s = socket.socket(socket.{family}, socket.SOCK_{kind}); \
             s.bind((\"{at}\", {port})){listen}; print(\"has it\", flush=True); time.sleep(1000)"
        );
        machine.run(&format!("systemd-run -q --unit {unit} --uid nobody python3 -c '{program}'")).ok();
        machine.until("it has the port", |machine| {
            machine.run(&format!("journalctl -u {unit} -o cat | grep -q 'has it'")).code == 0
        });
    };
    hold("udp", "DGRAM", "AF_INET", "0.0.0.0", 9100);
    hold("six", "STREAM", "AF_INET6", "::", 9200);
    hold("near", "STREAM", "AF_INET", address, 9300);
    deploy(&machine, &format!("three {image} 127.0.0.1:9300:8080")).ok();
    machine.run("docker run -d --name stranger -p 127.0.0.1:9400:8080 web:2").ok();
    let unchanged = machine.watch_docker();
    for (words, said) in [
        (format!("four {image} 9000:8080"), "port 9000/tcp is held by container ployz-"),
        (format!("four {image} 127.0.0.1:9000:8080"), "port 9000/tcp is held by container ployz-one"),
        (format!("four {image} {address}:9000:8080/udp"), "port 9000/udp is held by container ployz-one"),
        (format!("four {image} 9400:8080"), "port 9400/tcp is held by container stranger"),
        (format!("four {image} 9100:8080/udp"), "port 9100/udp is held by a process of uid 65534"),
        (format!("four {image} 127.0.0.1:9200:8080"), "port 9200/tcp is held by a process of uid 65534"),
        // A replacement, too: what serves must not be stopped for what can't start.
        (format!("one {image} 9100:8080/udp"), "port 9100/udp is held by a process of uid 65534"),
        (format!("one {image} 9000:8080"), "port 9000/tcp is held by container ployz-two"),
        (format!("three {image} 9300:8080"), "port 9300/tcp is held by a process of uid 65534"),
    ] {
        let run = deploy(&machine, &words).expect(4);
        let _ = run.says(&[said, "Now: nothing of the service was changed.", "ss -ltnup"]);
        unchanged.assert_same(&machine.watch_docker());
    }
    // What only looks taken is not.
    for words in [
        format!("four {image} 9100:8080"),
        format!("four {image} 127.0.0.2:9000:8080"),
        format!("three {image} 127.0.0.1:9300:8080 --env CHANGED=1"),
        format!("one {image} 127.0.0.1:9000:8080"),
    ] {
        deploy(&machine, &words).ok();
    }
    assert_eq!(page(&machine, "127.0.0.1:9300"), "page 1");
    machine.assert_healthy();
}

#[test]
fn the_machine_api_takes_a_specification_and_nothing_else_and_touches_nobody_elses_container() {
    let machine = Machine::named("service-api").image(Image::TrixieDocker).boot();
    machine.start_docker();
    machine.install_with_docker(&release("1.4.0")).ok();
    machine.run("useradd -m alice && usermod -a -G ployz alice; useradd -m bob").ok();
    machine.run("docker run -d --name stranger web:2; docker run -d --name ployz-taken web:2").ok();
    let traffic = machine.traffic("stranger");
    let unchanged = machine.watch_docker();
    let good = json!({"name": "web", "image": "web:1"});
    let with = |field: &str, value: Value| {
        let mut spec = good.clone();
        spec[field] = value;
        spec.to_string()
    };
    let post = "curl -sS -m 60 -o /tmp/answer -w '%{http_code}' --unix-socket /run/ployz/ployz.sock";
    let ask = |words: &str| {
        let run =
            machine.run_as("alice", &format!("{post} {words}; echo; cat /tmp/answer; rm -f /tmp/answer"));
        let (status, answer) = run.text().split_once('\n').unwrap_or((run.text(), ""));
        (status.to_owned(), answer.to_owned())
    };
    for (what, body, status) in [
        ("no JSON", "{".to_owned(), "422"),
        ("a list", "[\"web\",\"web:1\"]".to_owned(), "422"),
        ("nothing", String::new(), "422"),
        ("privileged", with("privileged", json!(true)), "422"),
        ("Docker's words", with("HostConfig", json!({"Privileged": true})), "422"),
        ("a path of the host", with("volumes", json!([{"name": "/etc", "target": "/e"}])), "422"),
        ("a key twice", "{\"name\":\"web\",\"image\":\"web:1\",\"image\":\"web:2\"}".to_owned(), "422"),
        ("a name with a path", with("name", json!("../web")), "422"),
        ("an odd byte", with("name", json!("w\u{1b}[31m")), "422"),
        ("another's container", json!({"name": "taken", "image": "web:1"}).to_string(), "409"),
        ("much of one kind", with("command", json!(vec!["x"; 100])), "422"),
        ("a lot", with("image", json!("x".repeat(3_000_000))), "413"),
    ] {
        machine.write("/tmp/body", "");
        let file = scenarios::scratch().join("body");
        std::fs::write(&file, &body).unwrap();
        machine.put(&file, "/tmp/body");
        machine.run("chmod 644 /tmp/body").ok();
        let (got, answer) = ask("http://m/v1/services --data-binary @/tmp/body");
        assert_eq!(got, status, "{what}: {answer}");
        let problem: Value =
            serde_json::from_str(&answer).unwrap_or_else(|e| panic!("{what}: {e}: {answer}"));
        assert!(problem["type"].is_string() && !answer.contains('\u{1b}'), "{what}: {answer}");
        note(&format!("{what}: {got} {}", problem["detail"].as_str().unwrap_or_default()));
        unchanged.assert_same(&machine.watch_docker());
    }
    for (path, status) in [("taken", "409"), ("stranger", "404"), ("..%2Fweb", "422"), ("nothing", "404")] {
        let (got, answer) = ask(&format!("-X DELETE http://m/v1/services/{path}"));
        assert_eq!(got, status, "{path}: {answer}");
    }
    unchanged.assert_same(&machine.watch_docker());
    let denied = machine.run_as("bob", &format!("{PLOYZD} service deploy web --image web:1")).expect(77);
    let _ = denied.says(&["usermod -a -G ployz"]);
    // One that is deployed, replaced and removed beside them changes nothing of theirs.
    for image in ["web:1", "web:2"] {
        machine.run_as("alice", &format!("{PLOYZD} service deploy web --image {image}")).ok();
    }
    machine.run_as("alice", &format!("{PLOYZD} service remove web")).ok();
    unchanged.assert_same(&machine.watch_docker());
    let served = machine.served(&traffic);
    assert!(served.asked > 50 && served.failed == 0, "{served:?}");
    machine.assert_healthy();
}
