//! Schemas of their own in the server of `DATABASE_URL`, and servers of their own where one is to be stopped.
#![allow(dead_code, unreachable_pub, reason = "every test binary includes this file and uses a part of it")]

use sqlx::{
    AssertSqlSafe, ConnectOptions, PgPool, Row,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};
use tower_herd_postgres::PostgresTokens;

/// How often, 50 ms apart, somebody who starts is asked whether it has.
const PATIENCE: u32 = 400;

pub fn seed() -> u64 {
    std::env::var("TOWER_HERD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

pub fn long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some()
}

pub fn database_url() -> String {
    std::env::var("DATABASE_URL").expect(
        "DATABASE_URL names no PostgreSQL server; `tests/run -- FILTER` starts one and says it to the tests",
    )
}

/// A schema that no other test uses. It stays: the server is thrown away, and one that is not finds it under the
/// name of the test.
pub struct Db {
    pub options: PgConnectOptions,
    pub schema: String,
    pub pool: PgPool,
    pub tokens: PostgresTokens,
}

pub async fn pool(options: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(60))
        .connect_with(options.disable_statement_logging())
        .await
        .expect("PostgreSQL answers at DATABASE_URL")
}

pub fn unique(test: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{test}_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Db {
    pub async fn new(test: &str) -> Self {
        Self::with(test, 8, |options| options).await
    }

    pub async fn with(
        test: &str,
        connections: u32,
        change: impl FnOnce(PgConnectOptions) -> PgConnectOptions,
    ) -> Self {
        let options = change(database_url().parse().expect("DATABASE_URL is a URL of PostgreSQL"));
        let schema = unique(test);
        let pool = pool(options.clone(), connections).await;
        let tokens = PostgresTokens::in_schema(pool.clone(), &schema).unwrap().seeded(seed());
        tokens.migrate().await.unwrap();
        Db { options, schema, pool, tokens }
    }

    /// With `{s}` for the schema.
    pub fn sql(&self, sql: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(sql.replace("{s}", &format!("\"{}\"", self.schema)))
    }

    pub async fn run(&self, sql: &str) -> u64 {
        sqlx::raw_sql(self.sql(sql)).execute(&self.pool).await.unwrap().rows_affected()
    }

    pub async fn number(&self, sql: &str) -> i64 {
        sqlx::raw_sql(self.sql(sql)).fetch_one(&self.pool).await.unwrap().get::<i64, _>(0)
    }

    /// How many grants of the key the trigger saw, and the shortest gap between two: by `not_before`, which is the
    /// instant that the store itself took and the window, or by `seen_at`, which is a little later, and right for
    /// stores that take another clock. To be prepared with [`watch`](Self::watch).
    pub async fn gaps(&self, key: &str, by: &str) -> (i64, Duration) {
        let row = sqlx::raw_sql(self.sql(&format!(
            "SELECT count(*), coalesce(min(gap), 0)::float8 FROM (
               SELECT extract(epoch FROM {by} - lag({by}) OVER (ORDER BY {by})) AS gap
               FROM {{s}}.seen WHERE key = '{key}') AS g"
        )))
        .fetch_one(&self.pool)
        .await
        .unwrap();
        (row.get(0), Duration::try_from_secs_f64(row.get(1)).unwrap())
    }

    /// Notes each grant with the database's time. An `extend` is none: it leaves the holder as it is.
    pub async fn watch(&self) {
        self.run(
            "CREATE TABLE {s}.seen (key text, not_before timestamptz, seen_at timestamptz);
             CREATE FUNCTION {s}.see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               INSERT INTO {s}.seen VALUES (new.key, new.not_before, clock_timestamp()); RETURN NULL;
             END $$;
             CREATE TRIGGER seen AFTER INSERT OR UPDATE OF streak ON {s}.retry_token
               FOR EACH ROW EXECUTE FUNCTION {s}.see()",
        )
        .await;
    }
}

// ---------------------------------------------------------------------------------------------- servers

/// Who may run a database: not root.
fn owner() -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let field = |line: &str, at| line.split(':').nth(at).and_then(|field| field.parse::<u32>().ok());
    let me = fs::metadata("/proc/self").map_or(1, |me| std::os::unix::fs::MetadataExt::uid(&me));
    (me == 0).then(|| {
        ["postgres", "nobody"]
            .iter()
            .find_map(|name| passwd.lines().find(|line| line.starts_with(&format!("{name}:"))))
            .and_then(|line| Some((field(line, 2)?, field(line, 3)?)))
            .expect("as root, the servers need a user postgres or nobody to run as")
    })
}

fn program(name: &str) -> PathBuf {
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    folders.extend(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((path.file_name()?.to_str()?.parse().ok()?, path.join("bin")))
        })
        .collect();
    versions.sort();
    folders.extend(versions.into_iter().rev().map(|(_, path)| path));
    folders.into_iter().map(|folder| folder.join(name)).find(|path| path.is_file()).unwrap_or_else(|| {
        panic!("{name} is missing (Debian: postgresql and pgbouncer); `tests/run -- FILTER` installs it")
    })
}

fn command(name: &str) -> Command {
    let mut command = Command::new(program(name));
    if let Some((uid, gid)) = owner() {
        command.uid(uid).gid(gid);
    }
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

#[expect(clippy::disallowed_methods, reason = "waits for another process, outside of any runtime")]
fn pause() {
    thread::sleep(Duration::from_millis(50));
}

/// A folder that is gone with its server.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> io::Result<Self> {
        let path = std::env::temp_dir().join(unique(name));
        fs::create_dir(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        if let Some((uid, gid)) = owner() {
            chown(&path, Some(uid), Some(gid))?;
        }
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A PostgreSQL of one's own, to be killed.
pub struct Server {
    folder: Folder,
    port: u16,
    child: Option<Child>,
}

impl Server {
    pub fn start() -> Self {
        let folder = Folder::new("postgres").unwrap();
        let made = command("initdb")
            .arg("-D")
            .arg(folder.0.join("data"))
            .args(["-U", "tower_herd", "--auth", "trust", "-E", "UTF8", "--locale", "C", "--no-sync"])
            .status()
            .unwrap();
        assert!(made.success(), "initdb: {made}");
        let mut server = Server { folder, port: free_port(), child: None };
        server.again();
        server
    }

    /// After [`kill`](Self::kill).
    pub fn again(&mut self) {
        let (data, port) = (self.folder.0.join("data"), self.port.to_string());
        // `tests/run` stops whoever left such a file.
        let pid = format!("external_pid_file={}", self.folder.0.join("server.pid").display());
        let child = command("postgres")
            .arg("-D")
            .arg(data)
            .arg("-k")
            .arg(&self.folder.0)
            .args(["-h", "127.0.0.1", "-p", &port, "-c", "fsync=off", "-c", &pid])
            .spawn();
        self.child = Some(child.unwrap());
        self.wait_until_it_answers();
    }

    fn wait_until_it_answers(&self) {
        for _ in 0..PATIENCE {
            let ready =
                command("pg_isready").args(["-h", "127.0.0.1", "-p", &self.port.to_string()]).status();
            if ready.unwrap().success() {
                return;
            }
            pause();
        }
        panic!("the private PostgreSQL does not answer");
    }

    pub fn url(&self) -> String {
        format!("postgres://tower_herd@127.0.0.1:{}/postgres", self.port)
    }

    /// As the kernel kills who uses too much memory: no word to anybody.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // SIGQUIT ends the children too, at once and without a checkpoint; SIGKILL would leave them.
            signal("QUIT", child.id());
            child.wait().unwrap();
        }
    }

    /// Nobody answers, and no connection breaks: a dead route, a stuck disk.
    pub fn freeze(&self) {
        self.all("STOP");
    }

    pub fn thaw(&self) {
        self.all("CONT");
    }

    fn all(&self, name: &str) {
        let Some(child) = &self.child else { return };
        let me = child.id();
        signal(name, me);
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let status = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent = status.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
            if parent == Some(&me.to_string())
                && let Some(pid) = entry.file_name().to_str().and_then(|pid| pid.parse().ok())
            {
                signal(name, pid);
            }
        }
    }
}

fn signal(name: &str, pid: u32) {
    Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
}

impl Drop for Server {
    fn drop(&mut self) {
        self.thaw();
        self.kill();
    }
}

/// PgBouncer in transaction mode in front of the server of `DATABASE_URL`.
pub struct PgBouncer {
    _folder: Folder,
    port: u16,
    child: Child,
}

impl PgBouncer {
    pub fn start(servers: u32) -> Self {
        let url = database_url().parse::<PgConnectOptions>().unwrap().to_url_lossy();
        let mut target = format!(
            "host={} port={} user={} dbname={}",
            url.host_str().unwrap_or("127.0.0.1"),
            url.port().unwrap_or(5432),
            url.username(),
            url.path().trim_start_matches('/'),
        );
        if let Some(password) = url.password() {
            target += &format!(" password={password}");
        }
        for _ in 0..3 {
            let (folder, port) = (Folder::new("pgbouncer").unwrap(), free_port());
            let (ini, pid) = (folder.0.join("pgbouncer.ini"), folder.0.join("pgbouncer.pid"));
            let settings = format!(
                "[databases]\napp = {target}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
                 unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = {servers}\n\
                 max_client_conn = 500\npidfile = {}\n",
                pid.display()
            );
            fs::write(&ini, settings).unwrap();
            let mut child = command("pgbouncer").arg("-q").arg(&ini).spawn().unwrap();
            for _ in 0..PATIENCE {
                if child.try_wait().unwrap().is_some() {
                    break;
                }
                if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                    return PgBouncer { _folder: folder, port, child };
                }
                pause();
            }
            child.kill().ok();
            child.wait().unwrap();
        }
        panic!("PgBouncer does not start");
    }

    /// Without the one startup parameter that PgBouncer does not know.
    pub fn options(&self) -> PgConnectOptions {
        let options: PgConnectOptions =
            format!("postgres://app@127.0.0.1:{}/app", self.port).parse().unwrap();
        options.extra_float_digits(None).disable_statement_logging()
    }

    pub fn url(&self) -> String {
        format!("postgres://app@127.0.0.1:{}/app", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
