//! Where the store is, and how long it may take.

use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, ProtocolVersion};
use redis::{
    TlsMode,
    io::tcp::TcpSettings,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};
use std::{error::Error, fmt, time::Duration};

/// Where a [`RedisStore`](crate::RedisStore) is, and how long it may take.
///
/// Addresses are URLs: `redis://[[user]:password@]host[:port][/db]`, `rediss://...` for TLS (feature `tls`),
/// `unix:///path[?db=n&user=...&pass=...]`; `valkey://` and `valkeys://` mean the same. What is special in a URL is
/// percent-encoded there; a password is better given with [`credentials`](Self::credentials).
#[derive(Clone)]
pub struct RedisConfig {
    pub(crate) mode: Mode,
    pub(crate) prefix: String,
    pub(crate) response_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) check_every: Duration,
    credentials: Option<(Option<String>, String)>,
    #[cfg(feature = "tls")]
    authority: Option<Vec<u8>>,
    #[cfg(feature = "tls")]
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone)]
pub(crate) enum Mode {
    Single(ConnectionInfo),
    Sentinel { master: String, sentinels: Vec<ConnectionInfo> },
    Cluster(Vec<ConnectionInfo>),
}

/// A configuration that cannot work.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// An address is none: its place in the list, and why.
    Address {
        /// Counted from 0.
        place: usize,
        /// What is wrong with it. The address itself may hold a password and is not repeated.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No address at all.
    NoAddress,
    /// `rediss://` without the feature `tls`.
    NoTls,
    /// The prefix is empty or has braces, which mean something in keys of a cluster.
    Prefix,
    /// A time is zero, or longer than an hour.
    Time(&'static str),
    /// A cluster has one database only, number 0.
    Database,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Address { place, .. } => {
                write!(f, "address {place} of the fleet's store is none that we know")
            }
            ConfigError::NoAddress => f.write_str("the fleet's store has no address"),
            ConfigError::NoTls => f.write_str("rediss:// needs the feature `tls` of tower-herd-redis"),
            ConfigError::Prefix => f.write_str("the prefix of keys must have a sign, and no braces"),
            ConfigError::Time(name) => {
                write!(f, "{name} of the fleet's store must be above zero, and an hour at most")
            }
            ConfigError::Database => f.write_str("a cluster has no database but 0"),
        }
    }
}

impl Error for ConfigError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            ConfigError::Address { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

impl RedisConfig {
    /// One server: alone, or a primary behind a name that always leads to it.
    ///
    /// # Errors
    ///
    /// If the URL is none.
    pub fn single(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(Mode::Single(parse(0, url)?)))
    }

    /// The primary that these sentinels call `master`. User and password in the URLs, those of the first, are for the
    /// sentinels; those for the servers come from [`credentials`](Self::credentials), their database from the
    /// first URL. With `rediss://` sentinels the servers speak TLS too.
    ///
    /// # Errors
    ///
    /// If there is no URL, or one of them is none.
    pub fn sentinel<'a>(master: &str, urls: impl IntoIterator<Item = &'a str>) -> Result<Self, ConfigError> {
        Ok(Self::new(Mode::Sentinel { master: master.to_owned(), sentinels: parse_all(urls)? }))
    }

    /// A cluster, by some of its nodes: the others are learned from them. One is enough while it lives; several
    /// are asked in turn. User and password are those of the first.
    ///
    /// # Errors
    ///
    /// If there is no URL, one of them is none, or names a database.
    pub fn cluster<'a>(urls: impl IntoIterator<Item = &'a str>) -> Result<Self, ConfigError> {
        let nodes = parse_all(urls)?;
        match nodes.iter().any(|node| node.redis_settings().db() != 0) {
            true => Err(ConfigError::Database),
            false => Ok(Self::new(Mode::Cluster(nodes))),
        }
    }

    fn new(mode: Mode) -> Self {
        RedisConfig {
            mode,
            prefix: "herd".to_owned(),
            response_timeout: Duration::from_millis(500),
            connect_timeout: Duration::from_secs(1),
            check_every: Duration::from_secs(5),
            credentials: None,
            #[cfg(feature = "tls")]
            authority: None,
            #[cfg(feature = "tls")]
            identity: None,
        }
    }

    /// What keys and channels begin with: `prefix:v1:{provider}`. Default `herd`. All processes of a fleet need
    /// the same one; different ones are different fleets on one server.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The user (none: `default`) and password at the servers. They go before those of a URL.
    #[must_use]
    pub fn credentials(mut self, user: Option<&str>, password: &str) -> Self {
        self.credentials = Some((user.map(str::to_owned), password.to_owned()));
        self
    }

    /// An exchange is given up after this time, connecting included. Default 500 ms. Well below the time between two
    /// renewals (1 s), or a slow server leaves no time for a second try. A connection that owes an answer for so
    /// long is replaced; a fleet gives up no later than its own timeout, so a longer time here only keeps dead
    /// connections for longer.
    #[must_use]
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// A connection that is not ready after this time is given up. Default 1 s. It is made beside the exchanges, none
    /// of which waits for it longer than its own time. (To find a primary through sentinels may take this time for each of
    /// them.)
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How often the subscription to wake-ups is renewed, which shows whether it still lives. Default 5 s,
    /// plus or minus a tenth. While it is dead unseen, wake-ups are lost, and polling does their work.
    #[must_use]
    pub fn check_every(mut self, time: Duration) -> Self {
        self.check_every = time;
        self
    }

    /// The certificates (PEM) of who may vouch for the servers, in place of the system's.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authority = Some(pem.into());
        self
    }

    /// A certificate and its key (PEM), for servers that ask for one.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_identity(mut self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.identity = Some((certificate.into(), key.into()));
        self
    }

    /// Checks everything, and fills credentials and certificates into the addresses.
    pub(crate) fn checked(mut self) -> Result<Self, ConfigError> {
        if self.prefix.is_empty() || self.prefix.contains(['{', '}']) {
            return Err(ConfigError::Prefix);
        }
        for (name, time) in [
            ("response_timeout", self.response_timeout),
            ("connect_timeout", self.connect_timeout),
            ("check_every", self.check_every),
        ] {
            if time.is_zero() || time > Duration::from_secs(3600) {
                return Err(ConfigError::Time(name));
            }
        }
        #[cfg(feature = "tls")]
        if self.nodes().iter().any(|node| is_tls(node.addr()))
            && rustls::crypto::CryptoProvider::get_default().is_none()
        {
            // Without a default, and with more than one provider built in by others, rustls panics. The only
            // error is that somebody else has just set one.
            rustls::crypto::ring::default_provider().install_default().ok();
        }
        if let Mode::Single(node) = &self.mode {
            let node = self.finished(0, node.clone())?;
            self.mode = Mode::Single(node);
        } else if let Mode::Cluster(nodes) = &self.mode {
            let finished = nodes.iter().enumerate().map(|(place, node)| self.finished(place, node.clone()));
            let finished = finished.collect::<Result<_, _>>()?;
            self.mode = Mode::Cluster(finished);
        } else {
            self.sentinel_client()?;
        }
        Ok(self)
    }

    #[cfg(feature = "tls")]
    fn nodes(&self) -> &[ConnectionInfo] {
        match &self.mode {
            Mode::Single(node) => std::slice::from_ref(node),
            Mode::Sentinel { sentinels, .. } => sentinels,
            Mode::Cluster(nodes) => nodes,
        }
    }

    fn finished(&self, place: usize, node: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        let mut settings = node.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        if let Some((user, password)) = &self.credentials {
            settings = settings.set_username(user.as_deref().unwrap_or("default")).set_password(password);
        }
        let node = node.set_redis_settings(settings.set_skip_set_lib_name()).set_tcp_settings(no_delay());
        #[cfg(feature = "tls")]
        if is_tls(node.addr()) {
            let client = Client::build_with_tls(node, self.certificates());
            return client
                .map(|client| client.get_connection_info().clone())
                .map_err(|error| bad(place, error));
        }
        let client = Client::open(node).map_err(|error| bad(place, error))?;
        Ok(client.get_connection_info().clone())
    }

    #[cfg(feature = "tls")]
    fn certificates(&self) -> redis::TlsCertificates {
        redis::TlsCertificates {
            client_tls: self
                .identity
                .clone()
                .map(|(client_cert, client_key)| redis::ClientTlsConfig { client_cert, client_key }),
            root_cert: self.authority.clone(),
        }
    }

    /// A client of its own for each connection: it keeps connections to sentinels on the runtime that made them.
    pub(crate) fn sentinel_client(&self) -> Result<SentinelClient, ConfigError> {
        let Mode::Sentinel { master, sentinels } = &self.mode else { return Err(ConfigError::NoAddress) };
        let first = sentinels.first().ok_or(ConfigError::NoAddress)?;
        let addresses = sentinels.iter().map(|node| node.addr().clone());
        let mut builder = SentinelClientBuilder::new(addresses, master, SentinelServerType::Master)
            .map_err(|error| bad(0, error))?
            .set_client_to_redis_protocol(ProtocolVersion::RESP3)
            .set_client_to_redis_tcp_settings(no_delay())
            .set_client_to_sentinel_tcp_settings(no_delay())
            .set_client_to_redis_db(first.redis_settings().db());
        if let Some(user) = first.redis_settings().username() {
            builder = builder.set_client_to_sentinel_username(user);
        }
        if let Some(password) = first.redis_settings().password() {
            builder = builder.set_client_to_sentinel_password(password);
        }
        if let Some((user, password)) = &self.credentials {
            builder = builder.set_client_to_redis_password(password);
            if let Some(user) = user {
                builder = builder.set_client_to_redis_username(user);
            }
        }
        if is_tls(first.addr()) {
            builder = builder
                .set_client_to_redis_tls_mode(TlsMode::Secure)
                .set_client_to_sentinel_tls_mode(TlsMode::Secure);
            #[cfg(feature = "tls")]
            {
                builder = builder
                    .set_client_to_redis_certificates(self.certificates())
                    .set_client_to_sentinel_certificates(self.certificates());
            }
        }
        builder.build().map_err(|error| bad(0, error))
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match &self.mode {
            Mode::Single(node) => format!("single {}", node.addr()),
            Mode::Sentinel { master, sentinels } => format!("sentinel {master} of {}", sentinels.len()),
            Mode::Cluster(nodes) => format!("cluster of {}, ...", nodes.len()),
        };
        f.debug_struct("RedisConfig")
            .field("mode", &mode)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// A report is one small piece: held back for the answer to the one before, it would wait 40 ms.
fn no_delay() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

fn is_tls(address: &ConnectionAddr) -> bool {
    matches!(address, ConnectionAddr::TcpTls { .. })
}

fn bad(place: usize, error: redis::RedisError) -> ConfigError {
    ConfigError::Address { place, source: Box::new(error) }
}

fn parse(place: usize, url: &str) -> Result<ConnectionInfo, ConfigError> {
    // The parser refuses these too, with an error that cannot be told from others.
    if cfg!(not(feature = "tls")) && (url.starts_with("rediss:") || url.starts_with("valkeys:")) {
        return Err(ConfigError::NoTls);
    }
    url.into_connection_info().map_err(|error| bad(place, error))
}

fn parse_all<'a>(urls: impl IntoIterator<Item = &'a str>) -> Result<Vec<ConnectionInfo>, ConfigError> {
    let nodes: Vec<_> =
        urls.into_iter().enumerate().map(|(place, url)| parse(place, url)).collect::<Result<_, _>>()?;
    match nodes.is_empty() {
        true => Err(ConfigError::NoAddress),
        false => Ok(nodes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_before_anything_is_connected() {
        let single = || RedisConfig::single("redis://localhost").unwrap();
        assert!(single().checked().is_ok());
        for url in
            ["", "localhost", "http://localhost", "redis://", "redis://h:99999", "redis://h/x", "unix:"]
        {
            let refused = RedisConfig::single(url).and_then(RedisConfig::checked);
            assert!(matches!(refused, Err(ConfigError::Address { place: 0, .. })), "{url}: {refused:?}");
        }
        let two = RedisConfig::cluster(["redis://a", "nothing"]);
        assert!(matches!(two, Err(ConfigError::Address { place: 1, .. })), "{two:?}");
        assert!(matches!(RedisConfig::cluster([]), Err(ConfigError::NoAddress)));
        assert!(matches!(RedisConfig::sentinel("herd", []), Err(ConfigError::NoAddress)));
        assert!(matches!(RedisConfig::cluster(["redis://a/1"]), Err(ConfigError::Database)));
        for prefix in ["", "{a}", "a}"] {
            assert!(matches!(single().prefix(prefix).checked(), Err(ConfigError::Prefix)), "{prefix}");
        }
        for time in [Duration::ZERO, Duration::MAX] {
            for config in
                [single().response_timeout(time), single().connect_timeout(time), single().check_every(time)]
            {
                assert!(matches!(config.checked(), Err(ConfigError::Time(_))), "{time:?}");
            }
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_needs_its_feature() {
        for url in ["rediss://localhost", "valkeys://localhost"] {
            assert!(matches!(RedisConfig::single(url), Err(ConfigError::NoTls)));
        }
    }

    #[test]
    fn nothing_secret_is_shown() {
        let config =
            RedisConfig::single("redis://user:s3cret@localhost").unwrap().credentials(None, "s3cret");
        let shown = format!("{config:?} {:?}", crate::RedisStore::new(config.clone()).unwrap());
        assert!(shown.contains("localhost") && !shown.contains("s3cret"), "{shown}");
        let error = RedisConfig::single("redis://user:s3cret@local host").unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}
