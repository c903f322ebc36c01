//! Writes the committed corpus:
//! `cargo run --manifest-path fuzz/Cargo.toml --no-default-features --example seed`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for seed in sessiond_fuzz::seeds::all() {
        let directory = corpus.join(seed.target);
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(seed.name), seed.bytes)?;
    }
    Ok(())
}
