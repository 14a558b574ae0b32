//! Tar archives, good and hostile. Written here, since a good library refuses to write most of this.

use super::gzip::{self, Gzip, Part};

/// The unit in which tar counts.
const BLOCK: usize = 512;

/// A `tar.gz` in the making.
#[derive(Clone, Debug, Default)]
pub struct Archive {
    parts: Vec<Part>,
    endless: bool,
    gzip: Gzip,
}

/// One member, as its header describes it: nothing of this need be true.
#[derive(Clone, Debug)]
pub struct Member {
    /// The name, at most 100 bytes of it; it need not be text.
    pub name: Vec<u8>,
    /// Type: `0` file, `1` hard link, `2` symlink, `3` and `4` devices, `5` directory, `6` fifo, or any other.
    pub kind: u8,
    /// The mode.
    pub mode: u32,
    /// Where a link leads.
    pub link: String,
    /// The size in the header.
    pub size: u64,
    /// Owner and group.
    pub owner: u32,
}

impl Member {
    /// A member of a type.
    pub fn new(name: impl Into<Vec<u8>>, kind: u8) -> Self {
        Self { name: name.into(), kind, mode: 0o755, link: String::new(), size: 0, owner: 0 }
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; BLOCK];
        put(&mut header, 0, 100, &self.name);
        put(&mut header, 100, 8, format!("{:07o}", self.mode).as_bytes());
        put(&mut header, 108, 8, format!("{:07o}", self.owner).as_bytes());
        put(&mut header, 116, 8, format!("{:07o}", self.owner).as_bytes());
        if self.size < 1 << 33 {
            put(&mut header, 124, 12, format!("{:011o}", self.size).as_bytes());
        } else {
            // GNU's way to write what doesn't fit into eleven octal digits.
            header[124] = 0x80;
            put(&mut header, 128, 8, &self.size.to_be_bytes());
        }
        put(&mut header, 136, 12, b"14740464000");
        header[156] = self.kind;
        put(&mut header, 157, 100, self.link.as_bytes());
        put(&mut header, 257, 8, b"ustar\x0000");
        if matches!(self.kind, b'3' | b'4') {
            put(&mut header, 329, 8, b"0000001");
            put(&mut header, 337, 8, b"0000003");
        }
        put(&mut header, 148, 8, b"        ");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        put(&mut header, 148, 8, format!("{sum:06o}\0 ").as_bytes());
        header
    }
}

fn put(header: &mut [u8], at: usize, room: usize, bytes: &[u8]) {
    let length = bytes.len().min(room);
    header[at..at + length].copy_from_slice(&bytes[..length]);
}

impl Archive {
    /// An empty archive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A file that anyone may execute. The name is written as it is, so it may be absolute or climb.
    #[must_use]
    pub fn file(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.file_with_mode(name, 0o755, bytes)
    }

    /// A file with a mode, 04755 for setuid.
    #[must_use]
    pub fn file_with_mode(self, name: &str, mode: u32, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        let size = bytes.len() as u64;
        self.member(&Member { mode, size, ..Member::new(name, b'0') }, bytes)
    }

    /// A directory.
    #[must_use]
    pub fn directory(self, name: &str) -> Self {
        self.member(&Member::new(name, b'5'), [])
    }

    /// A symbolic link.
    #[must_use]
    pub fn symlink(self, name: &str, target: &str) -> Self {
        self.member(&Member { link: target.to_owned(), mode: 0o777, ..Member::new(name, b'2') }, [])
    }

    /// A hard link.
    #[must_use]
    pub fn hard_link(self, name: &str, target: &str) -> Self {
        self.member(&Member { link: target.to_owned(), ..Member::new(name, b'1') }, [])
    }

    /// A character device.
    #[must_use]
    pub fn device(self, name: &str) -> Self {
        self.member(&Member::new(name, b'3'), [])
    }

    /// A fifo.
    #[must_use]
    pub fn fifo(self, name: &str) -> Self {
        self.member(&Member::new(name, b'6'), [])
    }

    /// A file of zeros: gibibytes of them are a few mebibytes in the archive.
    #[must_use]
    pub fn zeros(mut self, name: &str, size: u64) -> Self {
        self.push(Member { size, ..Member::new(name, b'0') }.header());
        self.parts.push(Part::Zeros(size.next_multiple_of(BLOCK as u64)));
        self
    }

    /// A file whose name is written GNU's way, of any length.
    #[must_use]
    pub fn file_with_gnu_name(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let mut long = name.as_bytes().to_vec();
        long.push(0);
        let size = long.len() as u64;
        self.member(&Member { size, ..Member::new("././@LongLink", b'L') }, long).file(name, bytes)
    }

    /// A file whose name is written in a pax header, of any length. The plain header says another name.
    #[must_use]
    pub fn file_with_pax_name(self, name: &str, plain: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.pax(&[("path", name)]).file(plain, bytes)
    }

    /// A pax header for the next member.
    #[must_use]
    pub fn pax(self, records: &[(&str, &str)]) -> Self {
        let text: String = records.iter().map(|(key, value)| pax_record(key, value)).collect();
        let size = text.len() as u64;
        self.member(&Member { size, mode: 0o644, ..Member::new("PaxHeaders/next", b'x') }, text)
    }

    /// Any member: its header, and the bytes that really follow.
    #[must_use]
    pub fn member(mut self, member: &Member, bytes: impl AsRef<[u8]>) -> Self {
        self.push(member.header());
        let mut bytes = bytes.as_ref().to_vec();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        self.push(bytes);
        self
    }

    /// Bytes that are no member.
    #[must_use]
    pub fn junk(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.push(bytes.as_ref().to_vec());
        self
    }

    /// Without the two empty blocks that end an archive.
    #[must_use]
    pub fn without_end(self) -> Self {
        Self { endless: true, ..self }
    }

    /// What is wrong with the compression.
    #[must_use]
    pub fn gzip(self, gzip: Gzip) -> Self {
        Self { gzip, ..self }
    }

    /// The bytes of the archive.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut parts = self.parts.clone();
        if !self.endless {
            parts.push(Part::Bytes(vec![0; 2 * BLOCK]));
        }
        gzip::compress(&parts, self.gzip)
    }

    fn push(&mut self, bytes: Vec<u8>) {
        match self.parts.last_mut() {
            Some(Part::Bytes(last)) => last.extend(bytes),
            _ => self.parts.push(Part::Bytes(bytes)),
        }
    }
}

impl From<Archive> for Vec<u8> {
    fn from(archive: Archive) -> Self {
        archive.bytes()
    }
}

impl From<&Archive> for Vec<u8> {
    fn from(archive: &Archive) -> Self {
        archive.bytes()
    }
}

/// `LENGTH key=value\n`, where the length counts its own digits.
fn pax_record(key: &str, value: &str) -> String {
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len() + 1;
    while length != rest.len() + length.to_string().len() {
        length = rest.len() + length.to_string().len();
    }
    format!("{length}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_lengths_count_themselves() {
        assert_eq!(pax_record("path", "a"), "9 path=a\n");
        assert_eq!(pax_record("path", ""), "8 path=\n");
        for length in 80..120 {
            let record = pax_record("path", &"x".repeat(length));
            assert!(record.starts_with(&format!("{} ", record.len())), "{record}");
        }
    }
}
