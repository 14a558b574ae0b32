//! Where root configured a key, `checksums.txt` must be signed by it (minisign); a matching checksum is not enough.

use std::fs;
use std::path::Path;

use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::json;

use crate::world::{World, alone, exact, from_disk};

/// A key and the number that minisign gives it.
struct Key(Ed25519KeyPair, [u8; 8]);

impl Key {
    fn new(seed: u8) -> Self {
        Self(Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap(), [seed; 8])
    }

    /// What is written into `install.json`.
    fn public(&self) -> String {
        base64(&[b"Ed".as_slice(), &self.1, self.0.public_key().as_ref()].concat())
    }

    /// A signature file for `data`; `legacy` signs the bytes themselves and not their hash.
    fn sign(&self, data: &[u8], legacy: bool) -> String {
        let (kind, signed) = if legacy { (b"Ed", data.to_vec()) } else { (b"ED", blake2b(data).to_vec()) };
        let signature = self.0.sign(&signed);
        let comment = "timestamp:1764547200\tfile:checksums.txt\thashed";
        let all = self.0.sign(&[signature.as_ref(), comment.as_bytes()].concat());
        let first = base64(&[kind.as_slice(), &self.1, signature.as_ref()].concat());
        format!(
            "untrusted comment: signature\n{first}\ntrusted comment: {comment}\n{}\n",
            base64(all.as_ref())
        )
    }
}

#[test]
fn checksums_must_be_signed_by_the_configured_key() {
    let alone = alone();
    let (own, other) = (Key::new(1), Key::new(2));
    let renumbered = Key(Ed25519KeyPair::from_seed_unchecked(&[2; 32]).unwrap(), [1; 8]);
    let good = |sums: &[u8]| Some(own.sign(sums, false));
    // What is beside `checksums.txt`, and a part of what is said of it; nothing when it is good.
    type Signs<'a> = &'a dyn Fn(&[u8]) -> Option<String>;
    let table: [(&str, Signs<'_>, &str); 10] = [
        ("good", &good, ""),
        ("not signed", &|_| None, "is not signed"),
        ("another key", &|sums| Some(other.sign(sums, false)), "checksums.txt"),
        ("another key under our number", &|sums| Some(renumbered.sign(sums, false)), "checksums.txt"),
        ("other bytes", &|_| Some(own.sign(b"other", false)), "checksums.txt"),
        ("the old form", &|sums| Some(own.sign(sums, true)), "checksums.txt"),
        ("empty", &|_| Some(String::new()), "can't be read"),
        ("a page", &|_| Some("<html>\n".into()), "can't be read"),
        ("cut off", &|sums| Some(own.sign(sums, false)[..120].into()), "can't be read"),
        ("another comment", &|sums| Some(own.sign(sums, false).replace("17645", "17646")), "checksums.txt"),
    ];
    for (name, signs, says) in table {
        for network in [false, true] {
            let world = World::new(&alone);
            world.settings(&json!({"signing_key": own.public()}));
            let published = world.release("1.4.0");
            sign(&published.directory, signs);
            let request = if network { exact("1.4.0") } else { from_disk("1.4.0", &published) };
            let what = format!("{name}, network: {network}");
            if says.is_empty() {
                world.installed(&request);
                continue;
            }
            let (reason, error) = world.failed(&request);
            assert_eq!(reason, "signature", "{what}: {error}");
            assert!(error.contains(says), "{what}: {error}");
            assert!(!world.host.installed().exists(), "{what}");
        }
    }
}

fn sign(release: &Path, signs: &dyn Fn(&[u8]) -> Option<String>) {
    let sums = fs::read(release.join("checksums.txt")).unwrap();
    if let Some(signature) = signs(&sums) {
        fs::write(release.join("checksums.txt.minisig"), signature).unwrap();
    }
}

#[test]
fn what_is_in_place_counts_as_signed_only_if_it_is() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    world.installed(&exact("1.4.0"));
    world.settings(&json!({"signing_key": Key::new(1).public()}));
    assert_eq!(world.failed(&exact("1.4.0")).0, "signature");
    sign(&published.directory, &|sums| Some(Key::new(1).sign(sums, false)));
    world.installed(&exact("1.4.0"));
}

#[test]
fn without_a_key_no_signature_is_looked_at() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    sign(&published.directory, &|_| Some("nonsense".into()));
    world.installed(&exact("1.4.0"));
    assert!(!world.server.settled().iter().any(|asked| asked.path.ends_with(".minisig")));
}

#[test]
fn the_tools_of_this_test_are_right() {
    let hash: String = blake2b(b"abc").iter().map(|byte| format!("{byte:02x}")).collect();
    let known = "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1\
                 7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923";
    assert_eq!(hash, known);
    assert_eq!(blake2b(&[0; 300]).len(), 64);
    assert_eq!(["", "f", "fo", "foo"].map(|text| base64(text.as_bytes())), ["", "Zg==", "Zm8=", "Zm9v"]);
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = three
            .iter()
            .chain([0; 2].iter())
            .take(3)
            .fold(0_usize, |number, byte| number << 8 | usize::from(*byte));
        for at in 0..4 {
            let digit = DIGITS[number >> (18 - 6 * at) & 63];
            text.push(if at <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

/// BLAKE2b with 64 bytes (RFC 7693): what minisign signs.
fn blake2b(data: &[u8]) -> [u8; 64] {
    let mut state = IV;
    state[0] ^= 0x0101_0040;
    let blocks = data.chunks(128).count().max(1);
    for number in 0..blocks {
        let block = &data[number * 128..data.len().min((number + 1) * 128)];
        let mut words = [0_u64; 16];
        for (word, bytes) in words.iter_mut().zip(block.chunks(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        let (counted, last) = ((number * 128 + block.len()) as u64, number + 1 == blocks);
        compress(&mut state, &words, counted, last);
    }
    let mut hash = [0; 64];
    for (bytes, word) in hash.chunks_mut(8).zip(state) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    hash
}

const IV: [u64; 8] = [
    0x6a09_e667_f3bc_c908,
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1,
    0x9b05_688c_2b3e_6c1f,
    0x1f83_d9ab_fb41_bd6b,
    0x5be0_cd19_137e_2179,
];

fn compress(state: &mut [u64; 8], words: &[u64; 16], counted: u64, last: bool) {
    const ORDER: [&[u8; 16]; 10] = [
        b"0123456789abcdef",
        b"ea489fd61c02b753",
        b"b8c052fdae367194",
        b"7931dcbe265a40f8",
        b"905724afe1bc683d",
        b"2c6a0b834d75fe19",
        b"c51fed4a0763928b",
        b"db7ec13950f4862a",
        b"6fe9b308c2d714a5",
        b"a2847615fb9e3cd0",
    ];
    let mut v = [0_u64; 16];
    v[..8].copy_from_slice(state);
    v[8..].copy_from_slice(&IV);
    v[12] ^= counted;
    if last {
        v[14] = !v[14];
    }
    for round in 0..12 {
        let word = |at: usize| words[char::from(ORDER[round % 10][at]).to_digit(16).unwrap() as usize];
        let columns = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]];
        let diagonals = [[0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]];
        for (at, [a, b, c, d]) in columns.into_iter().chain(diagonals).enumerate() {
            for (x, right) in [(word(2 * at), [32, 24]), (word(2 * at + 1), [16, 63])] {
                v[a] = v[a].wrapping_add(v[b]).wrapping_add(x);
                v[d] = (v[d] ^ v[a]).rotate_right(right[0]);
                v[c] = v[c].wrapping_add(v[d]);
                v[b] = (v[b] ^ v[c]).rotate_right(right[1]);
            }
        }
    }
    for at in 0..8 {
        state[at] ^= v[at] ^ v[at + 8];
    }
}
