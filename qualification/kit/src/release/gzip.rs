//! Gzip, good and damaged, and gibibytes of zeros in no time.

use flate2::{Compress, Compression, Crc, FlushCompress, Status};

/// Zeros are compressed once in this unit, and the result repeated.
const UNIT: usize = 1 << 20;

/// What is compressed.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Bytes(Vec<u8>),
    Zeros(u64),
}

/// What is wrong with the compressed file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gzip {
    /// Nothing.
    #[default]
    Good,
    /// So many bytes are missing at the end.
    Truncated(usize),
    /// So many bytes that are not gzip follow.
    TrailingGarbage(usize),
    /// Two gzip members, one behind the other, which is allowed.
    TwoMembers,
    /// The checksum at the end is another.
    BadChecksum,
    /// The length at the end is another.
    BadLength,
    /// It is not compressed at all.
    NotGzip,
}

/// Compresses the parts into one file.
pub(super) fn compress(parts: &[Part], gzip: Gzip) -> Vec<u8> {
    match gzip {
        Gzip::Good => member(parts),
        Gzip::Truncated(missing) => {
            let mut bytes = member(parts);
            bytes.truncate(bytes.len().saturating_sub(missing));
            bytes
        }
        Gzip::TrailingGarbage(count) => {
            let mut bytes = member(parts);
            bytes.resize(bytes.len() + count, b'#');
            bytes
        }
        Gzip::TwoMembers => {
            let (first, second) = halves(parts);
            [member(&first), member(&second)].concat()
        }
        Gzip::BadChecksum => damaged(parts, 8),
        Gzip::BadLength => damaged(parts, 4),
        Gzip::NotGzip => parts.iter().flat_map(plain).collect(),
    }
}

fn damaged(parts: &[Part], from_end: usize) -> Vec<u8> {
    let mut bytes = member(parts);
    let at = bytes.len() - from_end;
    bytes[at] ^= 0xff;
    bytes
}

fn plain(part: &Part) -> Vec<u8> {
    match part {
        Part::Bytes(bytes) => bytes.clone(),
        Part::Zeros(count) => vec![0; usize::try_from(*count).unwrap_or(UNIT)],
    }
}

/// Splits in the middle of the bytes, so that a reader of the first member alone sees half an archive.
fn halves(parts: &[Part]) -> (Vec<Part>, Vec<Part>) {
    match parts {
        [Part::Bytes(bytes)] => {
            let (first, second) = bytes.split_at(bytes.len() / 2);
            (vec![Part::Bytes(first.to_vec())], vec![Part::Bytes(second.to_vec())])
        }
        parts => {
            let (first, second) = parts.split_at(parts.len() / 2);
            (first.to_vec(), second.to_vec())
        }
    }
}

/// One gzip member.
fn member(parts: &[Part]) -> Vec<u8> {
    let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut crc = Crc::new();
    for part in parts {
        match part {
            Part::Bytes(plain) => {
                crc.update(plain);
                bytes.extend(deflate(plain, FlushCompress::Full));
            }
            Part::Zeros(count) => zeros(*count, &mut bytes, &mut crc),
        }
    }
    bytes.extend(deflate(&[], FlushCompress::Finish));
    bytes.extend(crc.sum().to_le_bytes());
    bytes.extend(crc.amount().to_le_bytes());
    bytes
}

/// A full flush ends on a byte and refers to nothing before it: compressed pieces can be put together.
fn deflate(plain: &[u8], flush: FlushCompress) -> Vec<u8> {
    let mut compress = Compress::new(Compression::fast(), false);
    let mut bytes = Vec::new();
    let mut at = 0;
    loop {
        bytes.reserve(plain.len() / 2 + 1024);
        let status = compress.compress_vec(&plain[at..], &mut bytes, flush);
        at = usize::try_from(compress.total_in()).unwrap_or(plain.len());
        let has_room = bytes.len() < bytes.capacity();
        if matches!(status, Ok(Status::StreamEnd) | Err(_)) || (at == plain.len() && has_room) {
            return bytes;
        }
    }
}

fn zeros(count: u64, bytes: &mut Vec<u8>, crc: &mut Crc) {
    let unit = vec![0; UNIT];
    let compressed = deflate(&unit, FlushCompress::Full);
    let mut unit_crc = Crc::new();
    unit_crc.update(&unit);
    for _ in 0..count / UNIT as u64 {
        bytes.extend(&compressed);
        crc.combine(&unit_crc);
    }
    let rest = usize::try_from(count % UNIT as u64).unwrap_or_default();
    crc.update(&unit[..rest]);
    bytes.extend(deflate(&unit[..rest], FlushCompress::Full));
}
