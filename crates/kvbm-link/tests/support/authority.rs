//! Certificates for tests: an authority, and what it signs.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// An authority, and the folder that its certificates are written to.
pub(crate) struct Authority<'a> {
    folder: &'a Path,
    name: &'static str,
    issuer: Issuer<'static, KeyPair>,
}

impl<'a> Authority<'a> {
    pub(crate) fn new(folder: &'a Path, name: &'static str) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        private(&folder.join(name), &certificate.pem());
        Self { folder, name, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join(self.name)
    }

    /// A certificate for this machine and its key: their files.
    pub(crate) fn issue(
        &self,
        name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(["localhost".into(), "127.0.0.1".into()]).unwrap();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let (cert, key_file) = (self.folder.join(name), self.folder.join(format!("{name}.key")));
        private(&cert, &certificate.pem());
        private(&key_file, &key.serialize_pem());
        (cert, key_file)
    }
}

pub(crate) fn private(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}
