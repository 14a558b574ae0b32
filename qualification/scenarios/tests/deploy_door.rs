//! The deploy door under attack: a process with the daemon's account, groups and sandbox asks for everything that would
//! make it root through Docker.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, note, release};
use serde_json::{Value, json};

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// Sends each line of a file to the door, and tries what needs no door.
const ATTACK: &str = r#"
import json, os, socket, sys, time
def ask(line, slow=False):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(60)
    try:
        s.connect("/run/ployz-deploy/deploy.sock")
        if slow:
            for byte in line[:7]:
                s.sendall(bytes([byte]))
                time.sleep(1)
        else:
            s.sendall(line)
        text = b""
        while True:
            piece = s.recv(65536)
            if not piece:
                break
            text += piece
        return text.decode().strip().split("\n")[-1] or "closed without an answer"
    except OSError as e:
        return "error: %s" % e
def tried(name, what):
    try:
        out(name, "worked: %r" % (what(),))
    except OSError as e:
        out(name, "error: %s" % e)
def out(name, said):
    print(json.dumps({"what": name, "said": said}), flush=True)
sys.stdout = open("/var/lib/ployz/attack.out", "w")
for line in open("/usr/local/share/attack.jsonl"):
    attack = json.loads(line)
    out(attack["what"], ask(attack["line"].encode("utf-8", "surrogateescape"), attack.get("slow", False)))
def docker():
    s = socket.socket(socket.AF_UNIX)
    s.connect("/run/docker.sock")
    return "connected"
tried("docker's socket", docker)
tried("the worker's state", lambda: os.listdir("/var/lib/ployz-deploy"))
tried("the worker's lock", lambda: open("/var/lib/ployz-deploy/deploy.lock", "w"))
tried("docker's files", lambda: os.listdir("/var/lib/docker"))
tried("its group", lambda: os.setgid(int(sys.argv[1])))
out("groups", str(os.getgroups()))
# Everything that the door has room for, and more, held open in silence: it is closed in time, and the door is open after it.
held = []
started = time.time()
for n in range(40):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(30)
    try:
        s.connect("/run/ployz-deploy/deploy.sock")
        s.sendall(b'{"list":' if n % 2 else b"")
        held.append(s)
    except OSError:
        s.close()
for s in held:
    try:
        while s.recv(65536):
            pass
    except OSError:
        pass
out("held open", "%.1f" % (time.time() - started))
"#;

/// A unit with everything that the daemon's has, and another program.
const UNIT: &str = "sed -e 's#^ExecStart=.*#ExecStart=/usr/bin/python3 /usr/local/share/attack.py GID#' \
    -e 's/^Type=.*/Type=oneshot/; /^NotifyAccess/d; /^Restart/d; /^Requires/d; /^After/d; s/^TimeoutStartSec=.*/TimeoutStartSec=300/' \
    /usr/local/lib/systemd/system/ployz.service >/etc/systemd/system/attack.service && systemctl daemon-reload";

fn attacks() -> Vec<Value> {
    let spec = json!({"name": "evil", "image": "web:1"});
    let with = |field: &str, value: Value| {
        let mut spec = spec.clone();
        spec[field] = value;
        json!({"deploy": spec}).to_string() + "\n"
    };
    let attack = |what: &str, line: String| json!({"what": what, "line": line});
    let mut all = vec![
        attack("privileged", with("privileged", json!(true))),
        attack("Docker's own words", with("HostConfig", json!({"Privileged": true}))),
        attack("a host path", with("binds", json!(["/:/host"]))),
        attack("a host path as a volume's name", with("volumes", json!([{"name": "/", "target": "/host"}]))),
        attack(
            "Docker's socket as a volume",
            with("volumes", json!([{"name": "/run/docker.sock", "target": "/s"}])),
        ),
        attack("a path with dots", with("volumes", json!([{"name": "../../../etc", "target": "/e"}]))),
        attack(
            "a volume with options",
            with("volumes", json!([{"name": "v1", "target": "/v", "options": {"o": "bind", "device": "/"}}])),
        ),
        attack("a mount in the target", with("volumes", json!([{"name": "v1", "target": "/v:/etc"}]))),
        attack(
            "a volume of somebody else that is a bind",
            with("volumes", json!([{"name": "bound", "target": "/v"}])),
        ),
        attack(
            "such a volume that bears our label",
            with("volumes", json!([{"name": "labelled", "target": "/v"}])),
        ),
        attack(
            "a plain volume of somebody else",
            with("volumes", json!([{"name": "foreign", "target": "/v"}])),
        ),
        attack("the host's processes", with("pid", json!("host"))),
        attack("the host's network", with("network", json!("host"))),
        attack("the host's users", with("userns", json!("host"))),
        attack("another container's processes", with("pid_mode", json!("container:precious"))),
        attack("a device", with("devices", json!(["/dev/vda"]))),
        attack("a capability", with("cap_add", json!(["SYS_ADMIN"]))),
        attack("no confinement", with("security_opt", json!(["apparmor=unconfined"]))),
        attack("labels", with("labels", json!({"ployz.service": "web"}))),
        attack("an image that bears our label", with("image", json!("labelled:1"))),
        attack("an image that is a flag", with("image", json!("--privileged"))),
        attack("an image with a query", with("image", json!("web:1&fromSrc=-"))),
        attack("an image with a newline", with("image", json!("web:1\r\nX: y"))),
        attack(
            "a name that is another's",
            json!({"deploy": {"name": "taken", "image": "web:1"}}).to_string() + "\n",
        ),
        attack(
            "a name that is a path",
            json!({"deploy": {"name": "../../x", "image": "web:1"}}).to_string() + "\n",
        ),
        attack("removal of another's container", "{\"remove\":{\"name\":\"taken\"}}\n".into()),
        attack("removal of one that bears our label", "{\"remove\":{\"name\":\"precious\"}}\n".into()),
        attack("removal by an id", "{\"remove\":{\"name\":\"ID\"}}\n".into()),
        attack("a word that is not known", "{\"exec\":{\"name\":\"web\",\"command\":[\"sh\"]}}\n".into()),
        attack(
            "a key twice",
            "{\"deploy\":{\"name\":\"evil\",\"image\":\"web:1\",\"image\":\"web:2\"}}\n".into(),
        ),
        attack("a list", "{\"deploy\":[\"evil\",\"web:1\"]}\n".into()),
        attack("a variable twice", with("environment", json!({})).replace("{}", "{\"A\":\"1\",\"A\":\"2\"}")),
        attack("a variable that is two", with("environment", json!({"A=1\nB": "2"}))),
        attack("a port that is none", with("ports", json!([{"host": 0, "container": 80}]))),
        attack(
            "a mode of a mount",
            with("volumes", json!([{"name": "v1", "target": "/v", "propagation": "shared"}])),
        ),
        attack(
            "a health check on the host",
            with("health", json!({"command": ["true"], "test": ["CMD-HOST", "sh"]})),
        ),
        attack("a runtime", with("runtime", json!("runc"))),
        attack("a cgroup", with("cgroup_parent", json!("/"))),
        attack("limits", with("ulimits", json!([{"Name": "nofile", "Soft": 1, "Hard": 1}]))),
        attack("a user of the host", with("user", json!("0:0"))),
        attack("deep nesting", "[".repeat(100_000) + "\n"),
        attack("a deep value", with("labels", json!(0)).replace('0', &"[".repeat(60_000))),
        attack("two lines", with("pull", json!("never")) + "{\"list\":{}}\n"),
        attack("no end", "x".repeat(300_000)),
        attack("bytes that are no text", "{\"deploy\":{\"name\":\"\u{fffd}\u{1b}[2J\"}}\n".into()),
    ];
    all.push(json!({"what": "a line that does not come", "line": "{\"list\":{}}", "slow": true}));
    all
}

#[test]
fn a_process_with_the_daemons_account_and_sandbox_gets_what_the_template_has_and_nothing_else() {
    let machine = Machine::named("deploy-door").image(Image::TrixieDocker).boot();
    machine.start_docker();
    let from = machine.deliver(&release("1.4.0"));
    let ployzd =
        from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
    machine.run(&format!("{ployzd}/ployzd install {from}")).ok();
    machine.run(&format!("{PLOYZD} service deploy web --image web:1")).ok();
    // What others have: a container, one under a name of ours, one that merely bears our label, volumes that lead to /.
    machine.run("docker run -d --name ployz-taken web:1 && docker run -d --name precious --label ployz.service=precious web:1").ok();
    machine.run("docker volume create -o type=none -o o=bind -o device=/ bound && docker volume create foreign && \
        docker volume create -o type=none -o o=bind -o device=/ --label ployz.service=web labelled").ok();
    machine.run("tar -C /tmp/image -c . | docker import -c 'LABEL ployz.service=web' -c 'CMD [\"/bin/sh\"]' - labelled:1").ok();
    let everything =
        "docker ps -a --no-trunc --format '{{.ID}} {{.Names}} {{.Image}}' | sort; docker volume ls -q";
    let before = machine.run(everything).expect(0).stdout;

    let id = machine.run("docker inspect -f '{{.Id}}' precious").text().to_owned();
    let lines: String = attacks()
        .iter()
        .map(|attack| {
            attack
                .to_string()
                .replace("\"ID\"", &format!("\"{id}\""))
                .replace("\\\"ID\\\"", &format!("\\\"{id}\\\""))
                + "\n"
        })
        .collect();
    let dir = scenarios::scratch().join("attack.jsonl");
    std::fs::write(&dir, lines).unwrap();
    machine.put(&dir, "/usr/local/share/attack.jsonl");
    machine.write("/usr/local/share/attack.py", ATTACK);
    machine.run("chmod 644 /usr/local/share/attack.*").ok();
    let gid = machine.run("getent group docker | cut -d: -f3").text().to_owned();
    machine.run(&UNIT.replace("GID", &gid)).ok();
    machine.run_within(200, "systemctl start attack.service").ok();
    let said = machine.read("/var/lib/ployz/attack.out");
    let mut seen = 0;
    for line in said.lines() {
        let tried: Value = serde_json::from_str(line).unwrap();
        let (what, answer) = (tried["what"].as_str().unwrap(), tried["said"].as_str().unwrap());
        seen += 1;
        note(&format!("{what}: {}", answer.chars().take(150).collect::<String>()));
        if what == "held open" {
            let seconds: f64 = answer.parse().unwrap();
            assert!((1.0..20.0).contains(&seconds), "the door was held for {seconds} s");
            continue;
        }
        if what == "groups" {
            assert!(!answer.contains(&gid), "{answer}");
            continue;
        }
        let refused =
            serde_json::from_str::<Value>(answer).is_ok_and(|value| value["failed"]["error"].is_string());
        assert!(refused || answer.starts_with("error: "), "{what} was not refused: {answer}");
        assert!(!answer.contains('\u{1b}'), "{what}: {answer:?}");
    }
    assert_eq!(seen, attacks().len() + 7, "{said}");
    assert_eq!(machine.run(everything).expect(0).stdout, before, "something is there that was not");

    // What may be had is the template's, whatever is in it.
    let body = json!({"name": "had", "image": "web:1", "environment": {"LD_PRELOAD": "/x"}, "volumes": [
        {"name": "mine", "target": "/var/run/docker.sock"}]});
    let api =
        format!("curl -sS -m 60 --unix-socket /run/ployz/ployz.sock http://m/v1/services --data '{body}'");
    machine.run(&api).ok();
    let host = machine.run("docker inspect ployz-had | jq -c '.[0].HostConfig'").expect(0).json();
    for (field, expected) in [
        ("Privileged", json!(false)),
        ("Binds", Value::Null),
        ("CapAdd", Value::Null),
        ("Devices", Value::Null),
        ("PidMode", json!("")),
        ("IpcMode", json!("private")),
        ("UsernsMode", json!("")),
        ("NetworkMode", json!("bridge")),
        ("CgroupnsMode", json!("private")),
        ("SecurityOpt", json!(["no-new-privileges"])),
        ("VolumesFrom", Value::Null),
        ("Mounts", json!([{"Source": "mine", "Target": "/var/run/docker.sock", "Type": "volume"}])),
    ] {
        assert!(host[field] == expected || host[field] == json!([]), "{field}: {}", host[field]);
    }
    // Others of this Machine can't even connect.
    machine.run("useradd -m bob").ok();
    let connect = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"/run/ployz-deploy/deploy.sock\")'";
    assert!(machine.run_as("bob", connect).both().contains("Permission denied"));
    machine.run("systemctl is-active ployz-deploy.socket").ok();
    machine.assert_healthy();
}
