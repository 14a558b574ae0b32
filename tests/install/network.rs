//! A source and a network that misbehave: each way ends within its deadline, with words of its own, and leaves the
//! installation as it is.

use std::thread;
use std::time::{Duration, Instant};

use kit::{Accept, Announce, How, Options, RangeLie, Rule, Server, Tls};
use ployz::install::attempt::{Installation, Outcome};
use ployz::install::release::Channel;
use serde_json::json;

use crate::world::{NONE, World, alone, channel, exact, script};

const ARCHIVE: &str = "*.tar.gz";
const CHECKSUMS: &str = "*/checksums.txt";
const POINTER: &str = "/v1/stable";
/// Deadlines under which nothing here takes long.
const DEADLINE: u64 = 2;

/// An archive that does not fit into one packet, whatever the compression.
fn big() -> Vec<u8> {
    let mut state = 1_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        format!("{state:08x}")
    };
    let mut bytes = script("1.4.0");
    bytes.extend((0..40_000).flat_map(|_| format!("# {}\n", noise()).into_bytes()));
    bytes
}

/// A host on which 1.3.0 is installed, and 1.4.0 to be had.
fn world(alone: &crate::world::Alone) -> World {
    let world = World::new(alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    world.publish("1.4.0", big());
    world.server.forget();
    world
}

#[test]
fn what_passes_is_survived() {
    let alone = alone();
    let world = world(&alone);
    let cut = |how| Rule::new(ARCHIVE).cut(20_000, how).times(1);
    let lies = |lie| vec![cut(How::Reset), Rule::new(ARCHIVE).range(lie)];
    let second = Duration::from_secs(1);
    // What is done; how many requests for the archive that makes; whether one of them resumes.
    for (name, rules, requests, resumes) in [
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
    ] {
        world.release("1.3.0");
        world.server.set_rules(Vec::new());
        world.installed(&exact("1.3.0"));
        world.server.forget();
        world.server.set_rules(rules);
        let record = world.install(&exact("1.4.0")).unwrap();
        assert!(matches!(record.outcome, Some(Outcome::Installed { .. })), "{name}: {record:#?}");
        assert_eq!(std::fs::read(world.host.installed()).unwrap(), big(), "{name}");
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
        assert!(start.elapsed() < Duration::from_secs(2), "{far}: there is no use in waiting");
        assert_eq!(reason, "unreachable", "{error}");
        assert!(error.contains("429 Too Many Requests, after 1 tries"), "{error}");
    }
}

/// What must not work: where, what is done, the reason of the record, a part of the text, and whether it was tried
/// again.
struct Bad {
    name: &'static str,
    at: &'static str,
    rule: Rule,
    reason: &'static str,
    says: &'static str,
    again: bool,
}

fn bad(plain: &Server) -> Vec<Bad> {
    let at = |path| move |name, rule: fn(Rule) -> Rule, reason, says, again| {
        Bad { name, at: path, rule: rule(Rule::new(path)), reason, says, again }
    };
    let (archive, checksums, pointer) = (at(ARCHIVE), at(CHECKSUMS), at(POINTER));
    let millis = Duration::from_millis;
    let mut all = vec![
        archive("404", |r| r.status(404), "not_found", "does not exist (status 404)", false),
        archive("410", |r| r.status(410), "not_found", "does not exist (status 410)", false),
        archive("403", |r| r.status(403), "refused", "answered 403 Forbidden", false),
        archive("401", |r| r.status(401), "refused", "answered 401 Unauthorized", false),
        archive("407", |r| r.status(407), "refused", "answered 407 Proxy", false),
        archive("204", |r| r.status(204), "refused", "answered 204 No Content", false),
        archive("302 to nowhere", |r| r.status(302), "refused", r#"answered 302 Found to "nowhere""#, false),
        archive("500", |r| r.status(500), "unreachable", "answered 500 Internal Server Error, after", true),
        archive("503", |r| r.status(503), "unreachable", "answered 503 Service Unavailable, after", true),
        archive("a loop", Rule::redirect_loop, "refused", "more than 5 redirects", false),
        archive("six redirects", |r| r.redirect_chain(6), "refused", "more than 5 redirects", false),
        archive("to a file", |r| r.redirect("file:///etc/passwd"), "refused", "file:///etc/passwd", false),
        archive("encoded", Rule::gzip_lie, "refused", "encoded the content, which was not asked for", false),
        archive("far too long", |r| r.announce(Announce::Length(1 << 40)), "refused", "announces 1099511627776", false),
        archive("without end", Rule::endless, "refused", "sent more than 67108864 bytes", false),
        archive("too short", |r| r.announce(Announce::Length(9000)), "checksum_mismatch", "checksums.txt says", false),
        archive("never whole", |r| r.announce(Announce::Length(1 << 20)), "unreachable", "after", true),
        archive("always cut", |r| r.cut(0, How::Reset), "unreachable", "after", true),
        archive("silent", |r| r.delay(Duration::from_secs(20)), "unreachable", "timed out", true),
        archive("stalls", |r| r.cut(100, How::Stall), "unreachable", "after", true),
        archive("a page", |r| r.body("<html>login</html>"), "checksum_mismatch", "checksums.txt says", false),
        archive("garbage", Rule::garbage, "unreachable", "after", true),
        archive("a huge head", |r| r.huge_header(4 << 20), "unreachable", "after", true),
        archive("wrong range", |r| r.range(RangeLie::Mislabelled), "checksum_mismatch", "says", true),
        checksums("403", |r| r.status(403), "", "answered 403 Forbidden", false),
        checksums("503", |r| r.status(503), "", "answered 503 Service Unavailable, after", true),
        checksums("without end", Rule::endless, "", "sent more than 262144 bytes", false),
        checksums("too long", |r| r.announce(Announce::Length(1 << 30)), "", "more than 262144", false),
        pointer("404", |r| r.status(404), "", "/v1/stable does not exist (status 404)", false),
        pointer("403 page", |r| r.status(403), "", "answered 403 Forbidden", false),
        pointer("429", |r| r.status(429), "", "answered 429 Too Many Requests, after", true),
        pointer("page", |r| r.body("<html>login</html>"), "", "not one line with a version", false),
        pointer("without end", Rule::endless, "", "sent more than 4096 bytes", false),
        pointer("garbage", Rule::garbage, "", "after", true),
    ];
    let drops = Rule::new(ARCHIVE).drip(1, millis(300));
    all.push(Bad { name: "a byte at a time", at: ARCHIVE, rule: drops, reason: "unreachable", says: "it was not complete (", again: false });
    let rule = Rule::new(ARCHIVE).redirect(plain.url() + "/x.tar.gz");
    let says = "a redirect to http://127.0.0.1:";
    all.push(Bad { name: "to http", at: ARCHIVE, rule, reason: "refused", says, again: false });
    let rule = Rule::at_accept(Accept::Hang);
    all.push(Bad { name: "no handshake", at: POINTER, rule, reason: "", says: "it was not complete (0 bytes", again: false });
    all
}

#[test]
fn what_does_not_pass_is_said_within_its_deadline() {
    let alone = alone();
    let site = tempfile::tempdir().unwrap();
    let plain = Server::start(Options::new(site.path()).tls(Tls::Plain)).unwrap();
    let all = bad(&plain);
    let worlds: Vec<World> = all.iter().map(|_| world(&alone)).collect();
    // At once: most of the time is spent waiting, and none of these comes to the point where something is run.
    thread::scope(|scope| {
        for (case, world) in all.into_iter().zip(worlds) {
            let Prepared { host, server, .. } = Prepared::of(world);
            scope.spawn(move || assert_bad(&case, &host, &server));
        }
    });
    assert!(plain.requests().is_empty(), "nothing was asked of the http server");
}
