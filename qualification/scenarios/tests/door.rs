//! The door: who and what is refused at it, how much it bears, and that those who only look are never in the way.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, hold, note, release, serve};
use serde_json::Value;

const PLOYZD: &str = "/usr/local/bin/ployzd";

/// Says something at the door, in python: the bytes, and for how long nothing is said before the end.
const SAY: &str = r#"
import json, socket, sys, time
ID = "0123456789abcdef0123456789abcdef"
GOOD = '{"attempt":"%s","version":"1.5.0"}' % ID
CASES = [
    ("a source", GOOD[:-1] + ',"url":"https://evil.test/x"}\n'),
    ("a path", GOOD[:-1] + ',"path":"/tmp/ployzd"}\n'),
    ("a command", GOOD[:-1] + ',"command":["sh"]}\n'),
    ("a digest", GOOD[:-1] + ',"sha256":"00"}\n'),
    ("a key twice", GOOD[:-1] + ',"version":"1.4.0"}\n'),
    ("nested", "[" * 2000 + "]" * 2000 + "\n"),
    ("a version with a path", GOOD.replace("1.5.0", "../../1.5.0") + "\n"),
    ("a version with an option", GOOD.replace("1.5.0", "--help") + "\n"),
    ("an id with a path", GOOD.replace(ID, "../../../../../../etc/passwd....") + "\n"),
    ("an unknown channel", GOOD[:-1] + ',"channel":"nightly"}\n'),
    ("a channel that forbids it", GOOD[:-1].replace("1.5.0", "2.0.0") + ',"channel":"stable"}\n'),
    ("binary", bytes(range(256)) * 4 + b"\n"),
    ("empty", "\n"),
    ("two lines", GOOD + "\n" + GOOD + "\n"),
    ("oversize", GOOD + " " * 5000 + "\n"),
    ("endless", "x" * 1000000),
    ("cut off", GOOD),
    ("silent", ""),
]
for name, said in CASES:
    door = socket.socket(socket.AF_UNIX)
    started = time.time()
    door.connect("/run/ployz-upgrade/upgrade.sock")
    door.settimeout(20)
    answer = b""
    try:
        door.sendall(said if isinstance(said, bytes) else said.encode())
        if name == "cut off":
            door.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    try:
        while True:
            some = door.recv(65536)
            if not some:
                break
            answer += some
    except OSError as e:
        answer = answer or str(e).encode()
    print(json.dumps({"case": name, "took": time.time() - started, "answer": answer.decode()[:400]}))
"#;

#[test]
fn other_users_and_whatever_is_no_plain_request_are_refused_before_anything_is_taken() {
    let server = serve("door").release(&release("1.4.0")).release(&release("1.5.0")).start();
    let machine = Machine::named("door").served_by(&server).installed("1.4.0").boot();
    machine.run("useradd -m alice && usermod -a -G ployz alice; useradd -m bob").ok();
    machine.assert_modes(&[("/run/ployz-upgrade/upgrade.sock", "socket ployz:root 600")]);
    let (before, attempts) = (machine.watch(), machine.attempts());
    let connect = "import socket; socket.socket(socket.AF_UNIX).connect('/run/ployz-upgrade/upgrade.sock')";
    for user in ["alice", "bob", "nobody", "ployz-fetch", "ployz-deploy"] {
        let run = machine.run_as(user, &format!("python3 -c \"{connect}\""));
        assert!(run.both().contains("Permission denied"), "{user}: {}", run.shown());
    }
    machine.write("/root/say.py", SAY);
    let heard = machine.run_within(90, "python3 /root/say.py").expect(0);
    let mut table = String::new();
    for case in heard.events() {
        let (answer, took) = (case["answer"].as_str().unwrap(), case["took"].as_f64().unwrap());
        let answer: Value = serde_json::from_str(answer).unwrap_or_else(|e| panic!("{e}: {case}"));
        let reason = answer["rejected"]["reason"].as_str().unwrap_or_else(|| panic!("not rejected: {case}"));
        assert!(took < 8.0, "it was held for {took} s: {case}");
        table += &format!(
            "\n{:<28} {took:>5.2} s  {}",
            case["case"].as_str().unwrap(),
            &reason[..reason.len().min(90)]
        );
    }
    note(&format!("refused at the door:{table}"));
    assert_eq!(machine.attempts(), attempts, "something was accepted");
    assert_eq!(machine.status()["admission"]["state"], "free");
    before.assert_same(&machine.watch());
    machine.assert_nothing_left();
    machine.assert_healthy();
    let unasked: Vec<String> = server.asked().into_iter().filter(|path| path.contains("v1.5.0")).collect();
    assert_eq!(unasked, Vec::<String>::new(), "something was fetched for a request that was refused");
}

/// So many at once, in python: each connects, says a request, and waits for an answer or the end.
const FLOOD: &str = r#"
import json, os, socket, sys, threading, time
many, where = int(sys.argv[1]), sys.argv[2]
ready, results = threading.Barrier(many), []
def one(n):
    id = os.urandom(16).hex()
    if where == "api":
        body = json.dumps({"attempt": id, "release": {"exact": "1.5.0"}})
        said = "POST /v1/upgrades HTTP/1.1\r\nhost: m\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        path = "/run/ployz/ployz.sock"
    else:
        said = ['{"attempt":"%s","version":"1.5.0"}\n' % id, "garbage\n", "", '{"attempt":'][n % 4]
        path = "/run/ployz-upgrade/upgrade.sock"
    answer, started = b"", None
    try:
        ready.wait()
        started = time.time()
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(60)
        s.connect(path)
        s.sendall(said.encode())
        while True:
            some = s.recv(65536)
            if not some:
                break
            answer += some
    except Exception as e:
        answer = answer or repr(e).encode()
    results.append({"id": id, "took": time.time() - started, "answer": answer.decode()})
threads = [threading.Thread(target=one, args=(n,)) for n in range(many)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(results))
"#;

#[test]
fn of_a_hundred_requests_at_once_one_is_accepted_and_the_door_outlives_a_flood() {
    let new = release("1.5.0");
    let server = serve("flood").release(&release("1.4.0")).release(&new).start();
    let machine = Machine::named("flood").served_by(&server).installed("1.4.0").boot();
    machine.write("/root/flood.py", FLOOD);
    hold(&server);
    let heard = machine.run("python3 /root/flood.py 100 api").expect(0).json();
    let (mut accepted, mut slowest) = (Vec::new(), 0.0f64);
    for one in heard.as_array().unwrap() {
        let answer = one["answer"].as_str().unwrap();
        let took = one["took"].as_f64().unwrap();
        if answer.starts_with("HTTP/1.1 202 ") {
            accepted.push(one["id"].as_str().unwrap().to_owned());
        } else {
            assert!(answer.starts_with("HTTP/1.1 409 ") && answer.contains("busy: upgrade "), "{answer}");
            slowest = slowest.max(took);
        }
    }
    note(&format!(
        "100 requests at the Machine API: 1 accepted, slowest busy after {:.0} ms",
        slowest * 1000.0
    ));
    assert_eq!(accepted.len(), 1, "{accepted:?}");
    assert!(slowest < 1.0, "busy took {slowest} s, and the budget is 100 ms on a quiet host");
    // Root at the door itself is told who has admission, by a worker that has not begun anything.
    let heard = machine.run("python3 /root/flood.py 1 door").expect(0).json();
    let busy: Value = serde_json::from_str(heard[0]["answer"].as_str().unwrap()).unwrap();
    assert_eq!(busy["busy"]["attempt"], accepted[0].as_str(), "{busy}");
    server.obey();
    machine.assert_upgraded(&accepted[0], &new);

    // At the door itself, as root: each connection is answered or closed, and the door stays open.
    for _ in 0..3 {
        let heard = machine.run_within(90, "python3 /root/flood.py 100 door").expect(0).json();
        for one in heard.as_array().unwrap() {
            let answer = one["answer"].as_str().unwrap();
            assert!(!answer.contains("timed out"), "a connection was neither answered nor closed: {one}");
        }
    }
    for id in machine.attempts() {
        let _ = machine.outcome_of(&id);
    }
    machine.assert_healthy();
    machine.assert_nothing_left();
    let id = machine.ask_for("1.4.0");
    machine.assert_upgraded(&id, &release("1.4.0"));
}

#[test]
fn those_who_look_all_the_time_never_make_an_attempt_busy_or_a_state_untrue() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("readers").release(&old).release(&new).start();
    let machine = Machine::named("readers").served_by(&server).setting("confirm_window", 0.into());
    let machine = machine.installed("1.4.0").boot();
    // Whoever looks must see an attempt as running until it has its outcome.
    let look = "curl -sS -m 5 --unix-socket /run/ployz/ployz.sock 'http://machine/v1/upgrades/latest'";
    let states = format!("until [ -e /run/enough ]; do {look} | jq -r .state; done");
    let readers: Vec<_> = (0..2)
        .map(|_| machine.start_run(&states))
        .chain([machine.start_run(&format!(
            "until [ -e /run/enough ]; do {PLOYZD} attempt --json | jq -r .state; done"
        ))])
        .collect();
    for n in 0..6 {
        let to = if n % 2 == 0 { &new } else { &old };
        let run = machine.run(&format!("{PLOYZD} upgrade --version {} --json", to.version)).expect(0);
        assert_eq!(run.record()["outcome"]["succeeded"]["version"], to.version.as_str());
    }
    let mut seen = std::collections::BTreeMap::new();
    machine.run("touch /run/enough").ok();
    for reader in readers {
        for state in reader.end().stdout.lines() {
            *seen.entry(state.to_owned()).or_insert(0usize) += 1;
        }
    }
    note(&format!("readers beside six upgrades saw {seen:?}"));
    assert!(seen.get("running").is_some_and(|n| *n > 5) && seen.contains_key("ended"), "{seen:?}");
    assert!(!seen.contains_key("interrupted"), "an attempt that ran was called interrupted: {seen:?}");
    machine.assert_healthy();
}
