//! Which server has which provider.
//!
//! The cluster client of the `redis` crate sends a request again that timed out, or follows no redirect at all: one
//! number counts both. A report that timed out must not be sent again, so the few lines that follow `MOVED` and
//! `ASK` are here. They need no map of slots: whoever is asked for a key that it does not have says who has it.

use crate::{
    config::{Mode, RedisConfig},
    error::{redirect, timed_out},
    link::{Link, Purpose, Ready, Target},
};
use redis::{Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value, cmd};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};
use tokio::time::Instant;

/// A slot that moves from node to node faster than this is followed in the next call.
const MOST_HOPS: u32 = 5;

pub(crate) enum Nodes {
    One(Link),
    Cluster(Box<Cluster>),
}

pub(crate) struct Cluster {
    // Address aside, all nodes are reached like this one.
    model: ConnectionInfo,
    config: RedisConfig,
    purpose: Purpose,
    table: Mutex<Table>,
}

struct Table {
    /// By `host:port`.
    links: BTreeMap<String, Link>,
    /// Slot to `host:port`. Told by whoever was connected to, and by each redirect.
    routes: HashMap<u16, Arc<str>>,
    // Whom to ask next for a key whose node is not known.
    turn: usize,
}

/// What to do at the server of a provider.
pub(crate) trait Ask {
    type Answer;

    /// On its connection. `once`: the slot is on its way there, so each command must be preceded by `ASKING`.
    fn ask(&self, ready: &mut Ready, once: bool) -> impl Future<Output = RedisResult<Self::Answer>> + Send;
}

impl Nodes {
    /// No I/O.
    pub(crate) fn new(config: &RedisConfig, purpose: Purpose) -> RedisResult<Self> {
        let link = |target, purpose| Link::new(target, false, config, purpose);
        Ok(match &config.mode {
            Mode::Single(node) => Nodes::One(link(Target::Node(Client::open(node.clone())?), purpose)),
            Mode::Sentinel { sentinels, .. } => {
                let client = config.sentinel_client().map_err(|error| {
                    RedisError::from((ErrorKind::InvalidClientConfig, "sentinel", error.to_string()))
                })?;
                let sentinels = u32::try_from(sentinels.len()).unwrap_or(u32::MAX);
                Nodes::One(link(
                    Target::Sentinel { client: tokio::sync::Mutex::new(client), sentinels },
                    purpose,
                ))
            }
            Mode::Cluster(nodes) => {
                let model =
                    nodes.first().ok_or((ErrorKind::InvalidClientConfig, "a cluster without a node"))?;
                let table = Table { links: BTreeMap::new(), routes: HashMap::new(), turn: 0 };
                let cluster = Cluster {
                    model: model.clone(),
                    config: config.clone(),
                    purpose,
                    table: Mutex::new(table),
                };
                for node in nodes {
                    cluster.learn(&node.addr().to_string())?;
                }
                Nodes::Cluster(Box::new(cluster))
            }
        })
    }

    /// Asks the server of `key`; the answer comes with the connection that it came over.
    pub(crate) async fn ask<A: Ask>(
        &self,
        key: &str,
        deadline: Instant,
        what: &A,
    ) -> RedisResult<(A::Answer, u64)> {
        match self {
            Nodes::One(link) => {
                let mut ready = link.ready(deadline).await?;
                let (id, asked) = (ready.id, ready.clone());
                let answer = link.run(&asked, deadline, what.ask(&mut ready, false)).await?;
                Ok((answer, id))
            }
            Nodes::Cluster(cluster) => cluster.ask(slot(key), deadline, what).await,
        }
    }

    /// A walk over the keys of each primary.
    pub(crate) async fn walks(&self, deadline: Instant) -> RedisResult<Vec<Walk>> {
        match self {
            Nodes::One(link) => Ok(vec![Walk(link.clone())]),
            Nodes::Cluster(cluster) => {
                // Whoever answers says which nodes there are.
                cluster.ask(0, deadline, &Nothing).await?;
                let primaries: BTreeSet<Arc<str>> = cluster.lock().routes.values().cloned().collect();
                primaries.iter().map(|address| cluster.learn(address).map(Walk)).collect()
            }
        }
    }

    /// All connections are made anew when they are next needed.
    pub(crate) fn replace(&self) {
        match self {
            Nodes::One(link) => link.replace(),
            Nodes::Cluster(cluster) => cluster.lock().links.values().for_each(Link::replace),
        }
    }
}

impl Cluster {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The link to a node, known or new.
    fn learn(&self, address: &str) -> RedisResult<Link> {
        let mut table = self.lock();
        if let Some(link) = table.links.get(address) {
            return Ok(link.clone());
        }
        let unknown =
            || RedisError::from((ErrorKind::ClusterConnectionNotFound, "no address", address.to_owned()));
        // The port is behind the last colon: hosts may be IPv6.
        let (host, port) = address.rsplit_once(':').ok_or_else(unknown)?;
        let port = port.parse().map_err(|_| unknown())?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let address_there = match self.model.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let client = Client::open(self.model.clone().set_addr(address_there))?;
        let link = Link::new(Target::Node(client), true, &self.config, self.purpose.clone());
        table.links.insert(address.to_owned(), link.clone());
        Ok(link)
    }

    /// What a node said about the others when it was connected to, once for each connection. What is known
    /// already is newer.
    fn learn_all(&self, ready: &Ready) -> RedisResult<()> {
        if ready.server.learned.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        for range in &ready.server.ranges {
            for node in &range.nodes {
                self.learn(node)?;
            }
            let Some(primary) = range.nodes.first() else { continue };
            let primary: Arc<str> = primary.as_str().into();
            let mut table = self.lock();
            for slot in range.first..=range.last {
                table.routes.entry(slot).or_insert_with(|| primary.clone());
            }
        }
        Ok(())
    }

    /// Where the slot was last, else a node that was not tried yet.
    fn choose(&self, slot: u16, tried: &[String]) -> Option<String> {
        let mut table = self.lock();
        if let Some(address) = table.routes.get(&slot)
            && !tried.iter().any(|tried| **tried == **address)
        {
            return Some((**address).to_owned());
        }
        let untried: Vec<_> =
            table.links.keys().filter(|address| !tried.contains(address)).cloned().collect();
        table.turn = table.turn.wrapping_add(1);
        let turn = table.turn.checked_rem(untried.len())?;
        untried.into_iter().nth(turn)
    }

    async fn ask<A: Ask>(&self, slot: u16, deadline: Instant, what: &A) -> RedisResult<(A::Answer, u64)> {
        let mut tried: Vec<String> = Vec::new();
        let mut last = None;
        let mut hops = 0;
        let mut next: Option<(String, bool)> = None;
        loop {
            let (address, once) = match next.take() {
                Some(next) => next,
                None => match self.choose(slot, &tried) {
                    Some(address) => (address, false),
                    None => return Err(last.unwrap_or_else(timed_out)),
                },
            };
            let link = self.learn(&address)?;
            let mut ready = match link.ready(deadline).await {
                Ok(ready) => ready,
                Err(error) => {
                    // Another node knows where the slot is now.
                    self.lock().routes.remove(&slot);
                    if Instant::now() >= deadline {
                        return Err(error);
                    }
                    last = Some(error);
                    tried.push(address);
                    continue;
                }
            };
            self.learn_all(&ready)?;
            let (id, asked) = (ready.id, ready.clone());
            match link.run(&asked, deadline, what.ask(&mut ready, once)).await {
                Ok(answer) => {
                    if !once {
                        self.lock().routes.insert(slot, address.into());
                    }
                    return Ok((answer, id));
                }
                Err(error) => {
                    if let Some((there, once)) = redirect(&error) {
                        let there = complete(there, &address);
                        if !once {
                            self.lock().routes.insert(slot, there.as_str().into());
                        }
                        hops += 1;
                        if hops > MOST_HOPS || tried.contains(&there) {
                            // Where it should be, nobody is.
                            return Err(last.unwrap_or(error));
                        }
                        next = Some((there, once));
                        continue;
                    }
                    // Done or not, it is not sent again; but the next is sent elsewhere if this node is of no use.
                    if !matches!(error.kind(), ErrorKind::Extension | ErrorKind::UnexpectedReturnType) {
                        self.lock().routes.remove(&slot);
                    }
                    return Err(error);
                }
            }
        }
    }
}

/// The slot of a key: CRC-16 (XMODEM) of its first `{...}` that is not empty, else of all of it, modulo 16384
/// (Redis cluster specification).
fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tag.filter(|tag| !tag.is_empty()).unwrap_or(key);
    let crc = hashed.bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    });
    crc % 16_384
}

/// A node that does not know its own name says only the port.
fn complete(there: &str, asked: &str) -> String {
    match there.rsplit_once(':') {
        Some(("" | "?", port)) => {
            let host = asked.rsplit_once(':').map_or(asked, |(host, _)| host);
            format!("{host}:{port}")
        }
        _ => there.to_owned(),
    }
}

/// A script, and its name in the cache of a server.
pub(crate) struct Code {
    source: &'static str,
    hash: String,
}

impl Code {
    pub(crate) fn new(source: &'static str) -> Self {
        Code { source, hash: redis::Script::new(source).get_hash().to_owned() }
    }
}

/// A script on one key.
pub(crate) struct Script<'a> {
    pub(crate) code: &'a Code,
    pub(crate) key: &'a str,
    pub(crate) arguments: Arguments<'a>,
    /// It writes nothing: where the server knows of such scripts, it may run where writes may not.
    pub(crate) reads: bool,
}

/// What the script is given.
pub(crate) enum Arguments<'a> {
    Lease { report: &'a str, channel: &'a str },
    Plain(&'a [String]),
}

impl Script<'_> {
    fn command(&self, name: &str, code: &str, ready: &Ready) -> Cmd {
        let mut command = cmd(name);
        command.arg(code).arg(1).arg(self.key);
        match &self.arguments {
            Arguments::Lease { report, channel } => {
                let publish = if ready.server.shards_channels() { "spublish" } else { "publish" };
                command.arg(report).arg(channel).arg(ready.server.run.as_str()).arg(publish);
            }
            Arguments::Plain(arguments) => {
                command.arg(arguments);
            }
        }
        command
    }
}

impl Ask for Script<'_> {
    type Answer = Value;

    async fn ask(&self, ready: &mut Ready, once: bool) -> RedisResult<Value> {
        let (by_hash, by_source) = match self.reads && ready.server.major >= 7 {
            true => ("EVALSHA_RO", "EVAL_RO"),
            false => ("EVALSHA", "EVAL"),
        };
        if once {
            // Together, or another command of ours could come between. By source: a pipeline cannot ask again.
            let command = self.command(by_source, self.code.source, ready);
            let mut pipeline = redis::pipe();
            pipeline.cmd("ASKING").ignore().add_command(command);
            let (answer,) = pipeline.query_async::<(Value,)>(&mut ready.connection).await?;
            return Ok(answer);
        }
        let command = self.command(by_hash, &self.code.hash, ready);
        match command.query_async(&mut ready.connection).await {
            // Each server of a cluster has its own cache, and a new primary's is empty. EVAL goes to the server of the
            // key, in one step; SCRIPT LOAD has no key.
            Err(error) if error.code() == Some("NOSCRIPT") => {
                let command = self.command(by_source, self.code.source, ready);
                command.query_async(&mut ready.connection).await
            }
            result => result,
        }
    }
}

/// The keys of one server.
pub(crate) struct Walk(Link);

impl Walk {
    /// Some keys that match the pattern, and where to go on; 0: that was all.
    pub(crate) async fn scan(
        &self,
        cursor: u64,
        pattern: &str,
        deadline: Instant,
    ) -> RedisResult<(u64, Vec<String>)> {
        let mut ready = self.0.ready(deadline).await?;
        let asked = ready.clone();
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000);
        self.0.run(&asked, deadline, command.query_async(&mut ready.connection)).await
    }
}

/// Only whether somebody is there.
struct Nothing;

impl Ask for Nothing {
    type Answer = ();

    async fn ask(&self, _ready: &mut Ready, _once: bool) -> RedisResult<()> {
        Ok(())
    }
}

/// Being told of what is published.
pub(crate) struct Subscription<'a> {
    pub(crate) channel: &'a str,
}

impl Ask for Subscription<'_> {
    type Answer = ();

    async fn ask(&self, ready: &mut Ready, _once: bool) -> RedisResult<()> {
        let name = if ready.server.shards_channels() { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        cmd(name).arg(self.channel).query_async::<Value>(&mut ready.connection).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("herd:v1:{foo}"), 12_182);
        assert_eq!(slot("a{foo}{bar}"), 12_182);
        assert_eq!(slot("{}foo"), slot("{}foo"));
        assert_ne!(slot("{}foo"), 12_182);
        assert_eq!(slot(""), 0);
        assert_eq!(slot("}{foo"), slot("}{foo"));
    }

    #[test]
    fn a_redirect_without_a_host_means_the_host_that_was_asked() {
        assert_eq!(complete("10.0.0.2:6380", "10.0.0.1:6379"), "10.0.0.2:6380");
        assert_eq!(complete(":6380", "10.0.0.1:6379"), "10.0.0.1:6380");
        assert_eq!(complete("?:6380", "node.example:6379"), "node.example:6380");
    }
}
