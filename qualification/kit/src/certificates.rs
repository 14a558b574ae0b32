//! The authority that signs the server's certificates, and the certificates, good and bad.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// The names of a good certificate, as in the lab and on loopback.
const NAMES: [&str; 5] = ["releases.ployz.test", "localhost", "127.0.0.1", "::1", "10.77.0.1"];
/// Written last into the authority's directory; another name makes a changed recipe take effect.
const MARKER: &str = ".recipe-1";

/// A certificate authority of the tests' own.
#[derive(Clone, Debug)]
pub struct Ca(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: &'static str,
    key: KeyPair,
    pem: String,
}

/// What is right or wrong with a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Good,
    Expired,
    NotYetValid,
    WrongName,
    UnknownIssuer,
}

impl Ca {
    /// The authority that all servers of this process share unless they are given another.
    ///
    /// # Errors
    /// When no key can be made.
    pub fn of_this_process() -> io::Result<Self> {
        static CA: OnceLock<Ca> = OnceLock::new();
        match CA.get() {
            Some(ca) => Ok(ca.clone()),
            None => Self::new("ployz tests").map(|made| CA.get_or_init(|| made).clone()),
        }
    }

    /// The authority that is kept in a directory as `ca.pem` and `ca.key`; made there if it is missing. Two
    /// callers at once get the same one.
    ///
    /// # Errors
    /// When the directory can't be read or written, or holds a key that is none.
    pub fn kept_in(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(directory.join(".lock"));
        match lock {
            Ok(lock) => lock.lock()?,
            // Whoever may read it may use it, even if it is not theirs to make.
            Err(problem) if !directory.join(MARKER).exists() => return Err(problem),
            Err(_) => return Self::read(directory),
        }
        if !directory.join(MARKER).exists() {
            let made = Self::new("ployz qualification")?;
            write(&directory.join("ca.key"), 0o600, &made.0.key.serialize_pem())?;
            write(&directory.join("ca.pem"), 0o644, &made.0.pem)?;
            write(&directory.join(MARKER), 0o644, "")?;
        }
        Self::read(directory)
    }

    /// The authority's certificate: what a client is to trust.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.0.pem
    }

    fn read(directory: &Path) -> io::Result<Self> {
        let key =
            KeyPair::from_pem(&fs::read_to_string(directory.join("ca.key"))?).map_err(io::Error::other)?;
        let pem = fs::read_to_string(directory.join("ca.pem"))?;
        Ok(Self(Arc::new(Inner { name: "ployz qualification", key, pem })))
    }

    fn new(name: &'static str) -> io::Result<Self> {
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let pem = authority(name).self_signed(&key).map_err(io::Error::other)?.pem();
        Ok(Self(Arc::new(Inner { name, key, pem })))
    }

    /// A server's configuration with a certificate that was signed just now.
    pub(crate) fn server(&self, kind: Kind, address: IpAddr) -> io::Result<ServerConfig> {
        let signer = if kind == Kind::UnknownIssuer { &Self::new("a stranger")? } else { self };
        let issuer = Issuer::new(authority(signer.0.name), &signer.0.key);
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let certificate = leaf(kind, address)?.signed_by(&key, &issuer).map_err(io::Error::other)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .map_err(io::Error::other)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// The same for the same name, so that an authority is known again by its name and key.
fn authority(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2049, 12, 31);
    params
}

fn leaf(kind: Kind, address: IpAddr) -> io::Result<CertificateParams> {
    let mut names: Vec<String> = NAMES.map(str::to_owned).into();
    if !names.contains(&address.to_string()) {
        names.push(address.to_string());
    }
    if kind == Kind::WrongName {
        names = vec!["elsewhere.ployz.test".to_owned()];
    }
    let mut params = CertificateParams::new(names).map_err(io::Error::other)?;
    params.distinguished_name.push(DnType::CommonName, "releases.ployz.test");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let (from, until) = match kind {
        Kind::Expired => (2020, 2021),
        Kind::NotYetValid => (2048, 2049),
        Kind::Good | Kind::WrongName | Kind::UnknownIssuer => (2020, 2049),
    };
    params.not_before = rcgen::date_time_ymd(from, 1, 2);
    params.not_after = rcgen::date_time_ymd(until, 12, 30);
    Ok(params)
}

fn write(path: &Path, mode: u32, text: &str) -> io::Result<()> {
    let mut next = path.as_os_str().to_owned();
    next.push(".next");
    // A leftover may have another mode.
    if let Err(problem) = fs::remove_file(&next)
        && problem.kind() != io::ErrorKind::NotFound
    {
        return Err(problem);
    }
    let mut file: File = OpenOptions::new().create_new(true).write(true).mode(mode).open(&next)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&next, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn made_once_and_private() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("ca");
        let all: Vec<_> = (0..4)
            .map(|_| {
                let directory = directory.clone();
                std::thread::spawn(move || Ca::kept_in(&directory).unwrap())
            })
            .map(|thread| thread.join().unwrap())
            .collect();
        assert!(all.iter().all(|ca| ca.pem() == all[0].pem()));
        assert_eq!(fs::metadata(directory.join("ca.key")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(all[0].pem().starts_with("-----BEGIN CERTIFICATE-----"));
    }
}
