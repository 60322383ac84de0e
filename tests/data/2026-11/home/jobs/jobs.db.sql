PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    experiment TEXT NOT NULL,
    arguments TEXT NOT NULL,
    private TEXT NOT NULL,
    resources TEXT NOT NULL,
    started_by TEXT NOT NULL,
    runner TEXT NOT NULL,
    retry_of TEXT REFERENCES jobs (id),
    key TEXT UNIQUE,
    body TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    exit_code INTEGER,
    reason TEXT NOT NULL DEFAULT '',
    links TEXT NOT NULL DEFAULT '{}',
    claimed REAL,
    cancel_requested REAL
) STRICT;
INSERT INTO "jobs" VALUES(1,'20261117-004911-c792ded2','collect','failed','tip-bench-recorded','{"allow_unknown_size": false, "concurrency": 1, "diversity": false, "evict": false, "experiment": "tip-bench-recorded", "max_model_b": 4.0, "mlflow_url": "http://localhost:5000", "models": "qwen2.5:0.5b,gemma3:1b,gemma3:27b", "n_scenarios": 6, "n_tips": 2, "num_ctx": 4096, "num_predict": 256, "ollama_url": "http://localhost:11434", "prompts": "v1,v2-mentor", "repeats": 1, "seed": 42, "server_wait_s": 300.0, "skip_refused": true, "suite": "tips", "temperature": 0.7, "timeout_s": 300.0, "unload": "model", "wait": false}','{}','["Ollama at http://localhost:11434", "gemma3:1b for tip-bench-recorded", "gemma3:27b for tip-bench-recorded", "qwen2.5:0.5b for tip-bench-recorded"]','boss','local',NULL,'nightly-1','43bdd15f475e643f0b8cf171e24a630e690c6226c817ed798245ead445979181',1.79487655114218807219e+09,1.7948765513329832554e+09,1.7948765543550906182e+09,1,'2 of 24 cells failed; a retry tries them again.','{"mlflow": "http://localhost:5000/#/experiments/1"}',1.79487655114299607273e+09,NULL);
INSERT INTO "jobs" VALUES(2,'20261117-004914-720d3867','collect','failed','tip-bench-recorded','{"allow_unknown_size": false, "concurrency": 1, "diversity": false, "evict": false, "experiment": "tip-bench-recorded", "max_model_b": 4.0, "mlflow_url": "http://localhost:5000", "models": "qwen2.5:0.5b,gemma3:1b,gemma3:27b", "n_scenarios": 6, "n_tips": 2, "num_ctx": 4096, "num_predict": 256, "ollama_url": "http://localhost:11434", "prompts": "v1,v2-mentor", "repeats": 1, "seed": 42, "server_wait_s": 300.0, "skip_refused": true, "suite": "tips", "temperature": 0.7, "timeout_s": 300.0, "unload": "model", "wait": false}','{}','["Ollama at http://localhost:11434", "gemma3:1b for tip-bench-recorded", "gemma3:27b for tip-bench-recorded", "qwen2.5:0.5b for tip-bench-recorded"]','boss','local','20261117-004911-c792ded2',NULL,'f7f1a7a4dbe06ffbc629a700b0b65656f7df96f81c14d9b841f373fb52be6dde',1.79487655443907451625e+09,1.79487655460835075381e+09,1.79487655611708855625e+09,1,'1 of 24 cells failed; a retry tries them again.','{"mlflow": "http://localhost:5000/#/experiments/1"}',1.79487655444003915789e+09,NULL);
INSERT INTO "jobs" VALUES(3,'20261117-004916-6cc4e43c','collect','succeeded','tip-bench-recorded','{"allow_unknown_size": false, "concurrency": 1, "diversity": false, "evict": false, "experiment": "tip-bench-recorded", "max_model_b": 4.0, "mlflow_url": "http://localhost:5000", "models": "baseline:template", "n_scenarios": 6, "n_tips": 2, "num_ctx": 4096, "num_predict": 256, "ollama_url": "http://localhost:11434", "prompts": "v1", "repeats": 1, "seed": 42, "server_wait_s": 300.0, "skip_refused": false, "suite": "tips", "temperature": 0.7, "timeout_s": 300.0, "unload": "model", "wait": false}','{}','["baseline:template for tip-bench-recorded"]','boss','local',NULL,NULL,'f3726aace7b0f10fb85cf20d5230e21877766b72865c87c148ebb77bb391502b',1.79487655617080855367e+09,1.79487655635240054129e+09,1.79487655785748028759e+09,0,'','{"mlflow": "http://localhost:5000/#/experiments/1"}',1.79487655617353034022e+09,NULL);
INSERT INTO "jobs" VALUES(4,'20261117-004918-bbaed3e3','judge','succeeded','tip-bench-recorded','{"experiment": "tip-bench-recorded", "mlflow_url": "http://localhost:5000", "with": "rules"}','{}','["judge rules in tip-bench-recorded"]','boss','local',NULL,NULL,'5dd7c1d9206a85a3b50e12c07165af5bab82a730f933a85f01d606ccf4842de6',1.79487655804005837435e+09,1.79487655820856904982e+09,1.79487656222912478451e+09,0,'','{}',1.794876558040971756e+09,NULL);
INSERT INTO "jobs" VALUES(5,'20261117-004922-8071a024','collect','cancelled','tip-bench-cancelled','{"allow_unknown_size": false, "concurrency": 1, "diversity": false, "evict": false, "experiment": "tip-bench-cancelled", "max_model_b": 4.0, "mlflow_url": "http://localhost:5000", "models": "gemma3:1b", "n_scenarios": 6, "n_tips": 2, "num_ctx": 4096, "num_predict": 256, "ollama_url": "http://localhost:11434", "prompts": "v1", "repeats": 1, "seed": 42, "server_wait_s": 300.0, "skip_refused": false, "suite": "tips", "temperature": 0.7, "timeout_s": 300.0, "unload": "model", "wait": false}','{}','["Ollama at http://localhost:11434", "gemma3:1b for tip-bench-cancelled"]','boss','local',NULL,NULL,'32d7f48197d286dee2ba1a46edf99403c86c413a88abe200801dd8a7a494d1b2',1.79487656234711289403e+09,1.79487656252053928368e+09,1.7948765670791082382e+09,130,'Cancelled; what is finished is kept.','{}',1.79487656235228586198e+09,1.79487656657477426527e+09);
INSERT INTO "jobs" VALUES(6,'20261117-005003-7856112b','collect','running','tip-bench-nightly','{"allow_unknown_size": false, "concurrency": 1, "diversity": false, "evict": false, "experiment": "tip-bench-nightly", "max_model_b": 4.0, "mlflow_url": "http://localhost:5000", "models": "qwen2.5:0.5b", "n_scenarios": 6, "n_tips": 2, "num_ctx": 4096, "num_predict": 256, "ollama_url": "http://localhost:11434", "prompts": "v1", "repeats": 1, "seed": 42, "server_wait_s": 300.0, "skip_refused": false, "suite": "tips", "temperature": 0.7, "timeout_s": 300.0, "unload": "model", "wait": false}','{}','["Ollama at http://localhost:11434", "qwen2.5:0.5b for tip-bench-nightly"]','boss','local',NULL,NULL,'43843a154299b6f0c6a3e09a5f978119f08ff78ddf63ea0410a466b8c9de6089',1.79487660320518159864e+09,1.79487660366654086119e+09,NULL,NULL,'','{}',1.79487660320924830438e+09,NULL);
CREATE INDEX jobs_by_state ON jobs (state, seq);
CREATE INDEX jobs_by_experiment ON jobs (experiment, seq);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',6);
COMMIT;
