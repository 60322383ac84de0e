#!/bin/sh
# Passes the secrets of compose.yaml to Airflow, then runs the airflow command given as arguments.
# So secrets are neither in the compose file nor in the image, nor among the variables that `docker inspect` shows.
set -eu

secret() {
    value="$(cat "/run/secrets/$1" 2>/dev/null || true)"
    if [ "${#value}" -lt 20 ]; then
        echo "The secret $1 needs 20 characters or more (got ${#value}). Set it in deploy/.env; see .env.example." >&2
        exit 2
    fi
    printf '%s' "$value"
}

database_password="$(secret airflow_db_password)"
AIRFLOW__API_AUTH__JWT_SECRET="$(secret airflow_jwt_secret)"
admin_password="$(secret airflow_admin_password)"
bench_password="$(secret airflow_bench_password)"
case "$database_password$admin_password$bench_password" in
*[!A-Za-z0-9_-]*)
    echo "Airflow's passwords may contain only letters, digits, - and _; create them with: openssl rand -hex 32" >&2
    exit 2
    ;;
esac
AIRFLOW__DATABASE__SQL_ALCHEMY_CONN="postgresql+psycopg2://airflow:$database_password@airflow-db:5432/airflow"
export AIRFLOW__API_AUTH__JWT_SECRET AIRFLOW__DATABASE__SQL_ALCHEMY_CONN

umask 077
mkdir -p "$AIRFLOW_HOME" "$TIPBENCH_HOME"
# Replaced atomically, because health checks run this script too, while Airflow may be reading the file.
printf '{"admin": "%s", "bench": "%s"}' "$admin_password" "$bench_password" > "$AIRFLOW_HOME/passwords.$$"
mv "$AIRFLOW_HOME/passwords.$$" "$AIRFLOW_HOME/passwords.json"

if [ "${1:-}" = set-up ]; then
    airflow db migrate
    airflow pools set ollama 1 "One model at a time on this Ollama host"
    exec airflow dags reserialize
fi
exec airflow "$@"
