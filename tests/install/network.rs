//! A source and a network that misbehave: each way ends within its deadline, with words of its own, and leaves the
//! installation as it is.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use kit::{Accept, Announce, How, Options, RangeLie, Rule, Server, Tls};
use ployz::install::attempt::{Installation, Outcome};
use ployz::install::release::Channel;
use serde_json::json;

use crate::world::{Alone, NONE, UNITS, World, alone, channel, exact, script_that};

const ARCHIVE: &str = "*.tar.gz";
const CHECKSUMS: &str = "*/checksums.txt";
/// For what only a deadline ends, in seconds. Whatever ends by itself has all the time that it needs, so that a busy
/// machine changes no outcome.
const DEADLINE: u64 = 3;
/// What no test here takes, however busy the machine is, and what waits for ever would.
const FOR_EVER: Duration = Duration::from_secs(45);

/// A release that does not fit into a few packets, whatever the compression; another one for another number.
fn big(number: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        format!("{state:08x}")
    };
    let mut bytes = script_that(&format!("# {number}"), "1.4.0", UNITS);
    bytes.extend((0..40_000).flat_map(|_| format!("# {}\n", noise()).into_bytes()));
    bytes
}

/// A host on which something is installed, and 1.4.0 to be had.
fn world(alone: &Alone) -> World {
    let world = World::new(alone);
    std::fs::write(world.host.installed(), "what runs here").unwrap();
    world.publish("1.4.0", big(0));
    world
}

#[test]
fn what_passes_is_survived() {
    let alone = alone();
    let world = world(&alone);
    world.settings(&json!({"deadlines": {"stall": 2}}));
    let cut = |how| Rule::new(ARCHIVE).cut(20_000, how).times(1);
    let lies = |lie| vec![cut(How::Reset), Rule::new(ARCHIVE).range(lie)];
    let second = Duration::from_secs(1);
    // What is done; how many requests for the archive that makes; whether one of them resumes.
    for (number, (name, rules, requests, resumes)) in [
        ("503 twice", vec![Rule::new(ARCHIVE).status(503).times(2)], 3, false),
        ("429", vec![Rule::new(ARCHIVE).status(429).header("Retry-After", "1").times(1)], 2, false),
        ("closed early", vec![cut(How::Close)], 2, true),
        ("closed without a word", vec![cut(How::Abrupt)], 2, true),
        ("reset", vec![cut(How::Reset)], 2, true),
        ("stalled", vec![cut(How::Stall)], 2, true),
        ("cut three times", vec![Rule::new(ARCHIVE).cut(20_000, How::Reset).times(3)], 4, true),
        ("ranges ignored", lies(RangeLie::Ignore), 2, true),
        ("ranges refused", lies(RangeLie::Refuse), 3, true),
        ("another range", lies(RangeLie::Shifted), 3, true),
        ("another file meanwhile", lies(RangeLie::Replaced), 2, true),
        ("in chunks", vec![Rule::new(ARCHIVE).announce(Announce::Chunked)], 1, false),
        ("no length", vec![Rule::new(ARCHIVE).announce(Announce::Nothing)], 1, false),
        ("more than announced", vec![Rule::new(ARCHIVE).extra(5000)], 1, false),
        ("hints first", vec![Rule::new(ARCHIVE).interim(10)], 1, false),
        ("late", vec![Rule::new(ARCHIVE).delay(second / 2)], 1, false),
        ("in drops", vec![Rule::new(ARCHIVE).drip(8192, second / 100)], 1, false),
        ("connections reset", vec![Rule::at_accept(Accept::Reset).times(2)], 1, false),
        ("connections closed", vec![Rule::at_accept(Accept::Close).times(2)], 1, false),
        ("no TLS at first", vec![Rule::at_accept(Accept::Garbage).times(1)], 1, false),
        ("no HTTP at first", vec![Rule::new(ARCHIVE).garbage().times(1)], 2, false),
        ("five redirects", vec![Rule::new("*").redirect_chain(5)], 6, false),
    ]
    .into_iter()
    .enumerate()
    {
        world.publish("1.4.0", big(number));
        world.server.forget();
        world.server.set_rules(rules);
        let record = world.install(&exact("1.4.0")).unwrap();
        assert!(matches!(record.outcome, Some(Outcome::Installed { .. })), "{name}: {record:#?}");
        assert!(std::fs::read(world.host.installed()).unwrap() == big(number), "{name}: other bytes");
        assert_eq!(world.left_over(), NONE, "{name}");
        let asked = world.server.settled().into_iter().filter(|asked| asked.path.ends_with(".tar.gz"));
        let asked: Vec<_> = asked.collect();
        assert_eq!(asked.len(), requests, "{name}: {asked:#?}");
        assert_eq!(asked.iter().any(|asked| asked.range.is_some()), resumes, "{name}");
        assert!(asked.iter().all(|asked| asked.header("user-agent") == Some("ployzd")), "{name}");
    }
}

#[test]
fn a_resumed_download_goes_on_where_it_stopped() {
    let alone = alone();
    let world = world(&alone);
    world.server.rule(Rule::new(ARCHIVE).cut(20_000, How::Reset).times(1));
    world.installed(&exact("1.4.0"));
    let asked = world.server.settled();
    let [first, second] = &asked[asked.len() - 2..] else { panic!("{asked:#?}") };
    let from: u64 = second.range.as_deref().unwrap()["bytes=".len()..].trim_end_matches('-').parse().unwrap();
    assert!(from > 0 && from <= first.sent, "{asked:#?}");
    assert!(second.header("if-range").is_some(), "only if it is still the same file");
    assert_eq!(second.status, 206);
}

#[test]
fn retry_after_is_obeyed_within_the_deadline() {
    let alone = alone();
    let world = world(&alone);
    let busy = |after: &str| vec![Rule::new(ARCHIVE).status(429).header("Retry-After", after).times(1)];
    world.server.set_rules(busy("2"));
    let start = Instant::now();
    world.installed(&exact("1.4.0"));
    assert!(start.elapsed() >= Duration::from_secs(2), "it was told to wait");

    world.release("1.5.0");
    for far in ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"] {
        world.server.set_rules(busy(far));
        let start = Instant::now();
        let (reason, error) = world.failed(&exact("1.5.0"));
        assert!(start.elapsed() < FOR_EVER, "{far}: there is no use in waiting");
        assert_eq!(reason, "unreachable", "{error}");
        assert!(error.contains("429 Too Many Requests, after 1 tries"), "{error}");
    }
}

/// How often it is tried at most.
const MOST_TRIES: usize = 12;

/// What must not work: what is done, the reason in the record, a part of the text, and what ends it. Before acceptance
/// there is no record, and no reason.
struct Bad {
    name: &'static str,
    rules: Vec<Rule>,
    reason: &'static str,
    says: &'static str,
    ends: Ends,
}

/// What ends it.
#[derive(Clone, Copy)]
enum Ends {
    /// The answer, after so many requests.
    Answered(usize),
    /// The deadline.
    Late,
}

fn bad(plain: &Server) -> Vec<Bad> {
    let once =
        |name, rule, reason, says| Bad { name, rules: vec![rule], reason, says, ends: Ends::Answered(1) };
    let refused = |name, rule, says| once(name, rule, "refused", says);
    let before = |name, rule, says| once(name, rule, "", says);
    let mismatch = |name, rule| once(name, rule, "checksum_mismatch", "and checksums.txt says");
    let times = |count, bad: Bad| Bad { ends: Ends::Answered(count), ..bad };
    let late = |bad: Bad| Bad { ends: Ends::Late, ..bad };
    // Without a wait, so that the number of tries ends it.
    let again = |rule: Rule, status| rule.status(status).header("Retry-After", "0");
    let unreachable = |name, rule| once(name, rule, "unreachable", "after ");
    let (archive, sums, pointer) =
        (|| Rule::new(ARCHIVE), || Rule::new(CHECKSUMS), || Rule::new("/v1/stable"));
    let wrong_range =
        vec![archive().cut(20_000, How::Reset).times(1), archive().range(RangeLie::Mislabelled)];
    vec![
        once("404", archive().status(404), "not_found", "does not exist (status 404)"),
        once("410", archive().status(410), "not_found", "does not exist (status 410)"),
        refused("403", archive().status(403), "the server answered 403 Forbidden"),
        refused("401", archive().status(401), "answered 401 Unauthorized"),
        refused("407", archive().status(407), "answered 407 Proxy"),
        refused("204", archive().status(204), "answered 204 No Content"),
        refused("redirect to nowhere", archive().status(302), r#"answered 302 Found to "nowhere""#),
        times(6, refused("redirect loop", archive().redirect_loop(), "more than 5 redirects")),
        refused("six redirects", archive().redirect_chain(6), "more than 5 redirects"),
        refused("to http", archive().redirect(plain.url() + "/x"), "a redirect to http://127.0.0.1:"),
        refused("to a file", archive().redirect("file:///etc/passwd"), "file:///etc/passwd"),
        refused("encoded", archive().gzip_lie(), "encoded the content, which was not asked for"),
        refused(
            "far too long",
            archive().announce(Announce::Length(1 << 40)),
            "announces 1099511627776 bytes",
        ),
        refused("without end", archive().endless(), "sent more than 67108864 bytes"),
        times(
            MOST_TRIES,
            Bad {
                says: "answered 500 Internal Server Error, after 12 tries",
                ..unreachable("500", again(archive(), 500))
            },
        ),
        times(
            MOST_TRIES,
            Bad {
                says: "answered 503 Service Unavailable, after 12 tries",
                ..unreachable("503", again(archive(), 503))
            },
        ),
        late(unreachable("never whole", archive().announce(Announce::Length(1 << 20)))),
        late(unreachable("cut at once", archive().cut(0, How::Reset))),
        late(unreachable("silent", archive().delay(4 * FOR_EVER))),
        late(unreachable("stalls", archive().cut(100, How::Stall))),
        late(unreachable("garbage", archive().garbage())),
        late(unreachable("a huge head", archive().huge_header(4 << 20))),
        late(unreachable("drops", archive().drip(1, Duration::from_millis(300)))),
        mismatch("too short", archive().announce(Announce::Length(9000))),
        mismatch("a page", archive().body("<html>log in</html>")),
        times(2, Bad { rules: wrong_range, ..mismatch("wrong range", archive()) }),
        before("checksums 403", sums().status(403), "answered 403 Forbidden"),
        times(
            MOST_TRIES,
            before("checksums 503", again(sums(), 503), "503 Service Unavailable, after 12 tries"),
        ),
        before("checksums without end", sums().endless(), "sent more than 262144 bytes"),
        before("checksums too long", sums().announce(Announce::Length(1 << 30)), "more than 262144"),
        before("pointer 404", pointer().status(404), "/v1/stable does not exist (status 404)"),
        before("pointer 403", pointer().status(403), "answered 403 Forbidden"),
        times(
            MOST_TRIES,
            before("pointer 429", again(pointer(), 429), "429 Too Many Requests, after 12 tries"),
        ),
        before("pointer page", pointer().body("<html>log in</html>"), "not one line with a version"),
        before("pointer without end", pointer().endless(), "sent more than 4096 bytes"),
        late(before("pointer garbage", pointer().garbage(), "after ")),
        late(before("no handshake", Rule::at_accept(Accept::Hang), "after ")),
    ]
}

#[test]
fn what_does_not_pass_is_said_within_its_deadline() {
    let alone = alone();
    let site = tempfile::tempdir().unwrap();
    let plain = Server::start(Options::new(site.path()).tls(Tls::Plain)).unwrap();
    let mut all = bad(&plain);
    // Those that wait first. Some at once: none of these comes as far as to run what it fetched.
    all.sort_by_key(|bad| !matches!(bad.ends, Ends::Late));
    let all = Mutex::new(all.into_iter().map(|bad| (bad, world(&alone))).collect::<Vec<_>>().into_iter());
    thread::scope(|scope| {
        for _ in 0..9 {
            scope.spawn(|| {
                while let Some((bad, world)) = { all.lock().unwrap().next() } {
                    assert_bad(&bad, &world);
                }
            });
        }
    });
    assert!(plain.requests().is_empty(), "nothing was asked of the http server");
}

fn assert_bad(bad: &Bad, world: &World) {
    let Bad { name, rules, reason, says, ends } = bad;
    if matches!(ends, Ends::Late) {
        world.settings(&json!({"deadlines": {"pointer": DEADLINE, "stall": 1, "acquire": DEADLINE}}));
    }
    let path = rules[0].path.trim_start_matches('*').to_owned();
    world.server.set_rules(rules.clone());
    let request =
        if path == "/v1/stable" || path.is_empty() { channel(Channel::Stable) } else { exact("1.4.0") };
    let start = Instant::now();
    let text = if reason.is_empty() {
        world.refused(&request)
    } else {
        let (found, error) = world.failed(&request);
        assert_eq!(found, *reason, "{name}: {error}");
        error
    };
    assert!(start.elapsed() < FOR_EVER, "{name}: {:?}", start.elapsed());
    assert!(text.contains(says), "{name}: {text}");
    assert!(text.len() < 600 && !text.contains(['\u{1b}', '\n']), "{name}: {text}");
    if let Ends::Answered(times) = ends {
        let asked = world.server.settled();
        let asked = asked.iter().filter(|asked| asked.path.ends_with(&path) && asked.query.is_none());
        assert_eq!(asked.count(), *times, "{name}: {text}");
    }
}

#[test]
fn an_unreachable_source_is_refused_before_acceptance() {
    let alone = alone();
    let world = World::new(&alone);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (releases, text, request) in [
        (format!("https://{closed}"), "Connection refused", exact("1.4.0")),
        ("https://releases.invalid".to_owned(), "dns error", channel(Channel::Stable)),
    ] {
        let deadlines = json!({"pointer": DEADLINE, "stall": 1});
        world.settings(&json!({"releases": releases, "channels": releases, "deadlines": deadlines}));
        let refused = world.refused(&request);
        assert!(refused.contains(text) && refused.contains(&releases), "{refused}");
        assert!(!world.host.install_state().exists());
    }
}

#[test]
fn what_was_refused_or_failed_can_be_asked_for_again() {
    let alone = alone();
    let world = world(&alone);
    for rule in [Rule::new(ARCHIVE).status(403), Rule::new(CHECKSUMS).status(403)] {
        world.server.set_rules(vec![rule]);
        let _ = world.install(&exact("1.4.0"));
        assert_eq!(std::fs::read(world.host.installed()).unwrap(), b"what runs here");
    }
    world.server.set_rules(Vec::new());
    let record = world.installed(&exact("1.4.0"));
    assert_eq!(record.installation, Installation::Replaced);
}
